"""vLLM's CPU build in bfloat16, through ``LLM.generate``, its engine in this process."""

from __future__ import annotations

import os
from typing import Any

from benchmark.peers.wire import Output, Request, Runner, serve

KV_SPACE_GIB = 2  # about 90,000 tokens of the default model


class VllmRunner:
    def __init__(self, settings: dict[str, Any]) -> None:
        cores = sorted(os.sched_getaffinity(0))[: settings["threads"]]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(KV_SPACE_GIB)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = os.environ["HF_HUB_OFFLINE"] = "1"
        import vllm

        self._llm = vllm.LLM(
            model=settings["directory"],
            dtype="bfloat16",
            max_model_len=4096,
            max_num_seqs=64,
            enable_prefix_caching=True,
        )
        self.version = vllm.__version__

    def run(self, requests: list[Request]) -> list[Output]:
        prompts = [{"prompt_token_ids": each.prompt} for each in requests]
        results = self._llm.generate(prompts, [_params(each) for each in requests], use_tqdm=False)
        return [Output(each.outputs[0].text, len(each.outputs[0].token_ids)) for each in results]

    def close(self) -> None:
        del self._llm


def _params(request: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    schema = request.schema
    return SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens,
        ignore_eos=schema is None,
        structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
    )


def build(settings: dict[str, Any]) -> Runner:
    return VllmRunner(settings)


if __name__ == "__main__":
    serve(build)
