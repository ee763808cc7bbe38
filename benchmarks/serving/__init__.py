"""Models with random weights in vLLM's engine: how soon it is up, and how fast it answers.

`checkpoints.py` makes the folders, `engine.py` starts vLLM in a process, `requests.py` measures an engine by sending it
requests, `run.py` does all of it for several formats, `page.py` shows what was found.
"""
