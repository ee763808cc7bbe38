"""How much quality a quantizer keeps: a small language model, its training, and its perplexity at 8 to 2 bits.

    python -m benchmarks.quality.train KJV.JSONL     trains the model (once: its weights are committed here)
    python -m benchmarks.quality.measure             writes docs/results/quality.json
    python -m benchmarks.quality.report              writes docs/quality.md's table and docs/img/quality.svg

The other programs have a question each, and put a table of their own into a page (`section.py`): `draws`, `eight_bit`,
`plans`, `plans_by_text`, `spqr` and `spqr_plans` for the small model, `encoder` and `encoder_layers` for a trained
sentence encoder, and `plans_of_models` for it and a model of antibodies. `python -m benchmarks quality` has layers of
several models (`layers`): `ranges` of the default and what of them is chance (`roundings`), `methods` by their
time, and `authors` and `references`, beside the code of others (`adapters`) and of llama.cpp. Their texts are drawn
several times (`spread`).
"""
