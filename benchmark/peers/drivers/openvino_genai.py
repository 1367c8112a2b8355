"""OpenVINO GenAI's continuous batching, which reads a GGUF file in float16 and caches prefixes."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmark.peers.wire import Output, Request, Runner, serve

BLOCK = 32  # tokens of one block of its K/V cache on CPU


class OpenVinoRunner:
    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = settings["pool_tokens"] // BLOCK
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = 2048
        scheduler.max_num_seqs = 64
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings["gguf_f16"], scheduler, "CPU", {"INFERENCE_NUM_THREADS": settings["threads"]}
        )
        self._tokenizer = self._pipeline.get_tokenizer()
        self.version = openvino_genai.__version__

    def run(self, requests: list[Request]) -> list[Output]:
        prompts = [openvino.Tensor(np.asarray([each.prompt], dtype=np.int64)) for each in requests]
        results = self._pipeline.generate(prompts, [_config(each) for each in requests])
        ids = [list(each.m_generation_ids[0]) for each in results]
        return [Output(self._tokenizer.decode(each), len(each)) for each in ids]

    def close(self) -> None:
        del self._pipeline


def _config(request: Request) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.max_tokens
    config.do_sample = False
    config.ignore_eos = request.schema is None
    if request.schema is not None:
        config.structured_output_config = openvino_genai.StructuredOutputConfig(json_schema=request.schema)
    return config


def build(settings: dict[str, Any]) -> Runner:
    return OpenVinoRunner(settings)


if __name__ == "__main__":
    serve(build)
