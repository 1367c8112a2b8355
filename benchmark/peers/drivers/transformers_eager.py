"""transformers in bfloat16: one padded batch through ``generate``. It shares no prefixes and knows no constraints."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmark.peers.wire import Output, Request, Runner, serve


class TransformersRunner:
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        directory = settings["directory"]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16
        ).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.version = f"{transformers.__version__}, torch {torch.__version__}"

    def run(self, requests: list[Request]) -> list[Output]:
        if any(each.schema is not None for each in requests):
            raise ValueError("generate() takes no JSON schema")
        sizes = {each.max_tokens for each in requests}
        if len(sizes) > 1:
            raise ValueError(f"one batch generates one number of tokens, not {sorted(sizes)}")
        (size,) = sizes
        longest = max(len(each.prompt) for each in requests)
        ids = [[0] * (longest - len(each.prompt)) + each.prompt for each in requests]
        mask = [[0] * (longest - len(each.prompt)) + [1] * len(each.prompt) for each in requests]
        with torch.inference_mode():
            rows = self._model.generate(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                max_new_tokens=size,
                min_new_tokens=size,
                do_sample=False,
                pad_token_id=0,
            )
        new = rows[:, longest:].tolist()
        texts = self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return [Output(text, len(row)) for text, row in zip(texts, new, strict=True)]

    def close(self) -> None:
        del self._model


def build(settings: dict[str, Any]) -> Runner:
    return TransformersRunner(settings)


if __name__ == "__main__":
    serve(build)
