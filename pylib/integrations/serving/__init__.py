"""What the plugins of servers share; nothing here imports a server.

`names.py` finds the modules of a checkpoint that a layer of the server is made of. `rows.py`, `experts.py` and
`expert_sources.py` put their weights together, `held.py` gives them to the layer. `startup.py` compiles the kernels.
"""
