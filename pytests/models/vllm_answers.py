"""A process that runs a model in vLLM: test_vllm.py starts it, as vLLM has to be first to load an engine in a process.

    python -m pytests.models.vllm_answers ARGUMENTS    those of vllm.LLM, as JSON, and the folder of an "adapter", or
                                                       one whose weights the model takes before it answers, "reload"

It prints as JSON: the likeliest tokens after each prompt, how likely vLLM takes the tokens of the prompts to be, and
what its layers do.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 97], [100, 1, 200], [11 * n % 251 + 3 for n in range(20)]]
COUNT = 6  # tokens that follow


def kinds(model: Any) -> list[str]:
    """Returns the names of the methods of a model's layers."""
    return sorted({type(module.quant_method).__name__ for module in model.modules() if hasattr(module, "quant_method")})


def gates(model: Any) -> int:
    """Returns how many layers apply the activation behind them."""
    return sum(getattr(getattr(module, "quant_method", None), "gate", None) is not None for module in model.modules())


def main(arguments: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, arguments.pop("adapter")) if "adapter" in arguments else None
    reload = arguments.pop("reload", None)
    llm = LLM(skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, dtype="bfloat16", **arguments)
    wanted = SamplingParams(max_tokens=COUNT, temperature=0, detokenize=False, ignore_eos=True, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    groups = [[prompt] for prompt in prompts] if adapter else [prompts]  # vLLM 0.32 can't join logprobs with adapters
    if reload is not None:
        llm.generate(prompts, wanted)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload})
        llm.reset_prefix_cache()
    answers = [answer for group in groups for answer in llm.generate(group, wanted, lora_request=adapter)]
    found = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "logprobs": [
            [row[token].logprob for row, token in zip(answer.prompt_logprobs[1:], prompt[1:])]
            for answer, prompt in zip(answers, PROMPTS)
        ],
        "kinds": llm.apply_model(kinds)[0],
        "gates": llm.apply_model(gates)[0],
    }
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    from pytests.models import vllm_answers  # the name by which vLLM's own processes import what they are to run

    vllm_answers.main(json.loads(sys.argv[1]))
