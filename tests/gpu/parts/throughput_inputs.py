"""What contenders of `parts.throughput` train on: a text of drawn words, its rows, and one set of weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM

from meshwright.data.loader import Loader
from meshwright.data.tokens import TokenSet
from tests.gpu.parts.throughput_cases import Case, Shape


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Text, rows and weights in a folder, and the words by which ``meshwright`` finds them."""

    work: Path
    shapes: dict[str, Shape]

    def write_text(self, documents: int) -> None:
        """Writes documents of words whose frequencies fall as Zipf's law says, and a tokenizer of these words.

        Lengths are log-normal around 600 tokens, so that a row of 4,096 holds several documents.
        """
        # Two hold for all: ids fit both vocabularies.
        words = min(shape.vocab for shape in self.shapes.values()) - 2
        tokenizer = Tokenizer(
            models.WordLevel({"</s>": 0, "?": 1} | {f"w{index}": index + 2 for index in range(words)}, unk_token="?")
        )
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        # The model's folder has it too: its weights are trained on their own ids.
        for folder in (self.work / "tokenizer", self.work / "model"):
            folder.mkdir(exist_ok=True)
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        draw = np.random.default_rng(7)
        share = 1.0 / np.arange(3, words + 3)
        cumulative = np.cumsum(share / share.sum())
        usual = self.shapes["1.2b"].sequence * 600 / 4096
        lengths = np.clip(draw.lognormal(np.log(usual), 0.8, documents), 4, 20 * usual).astype(int)
        with (self.work / "texts.jsonl").open("w") as file:
            for length in lengths:
                ids = np.minimum(np.searchsorted(cumulative, draw.random(length)), words - 1)
                file.write('{"text": "' + " ".join(f"w{index}" for index in ids) + '"}\n')

    def data_words(self, shape: Shape, documents: bool, prepares: bool = False) -> list[str]:
        """Returns the settings of the text, as words of ``meshwright train`` or ``prepare``."""
        prefix = "--" if prepares else "--data."
        words = [*([] if prepares else ["--data"]), str(self.work / "texts.jsonl")]
        settings = {"tokenizer": self.work / "tokenizer", "validation-share": 0, "cache": self.work / "prepared"}
        words += [word for name, value in settings.items() for word in (f"{prefix}{name}", str(value))]
        if not prepares:
            words += ["--data.sequence", str(shape.sequence)]
            words += ["--data.mask-documents" if documents else "--data.no-mask-documents"]
        return words

    def model_words(self, case: Case, shape: Shape, warms: bool) -> list[str]:
        """Returns the model as words of ``meshwright train``: the folder of the 1.2B, or a llama with weights drawn."""
        if case.shape == "1.2b":
            words = ["--model", str(self.work / "model"), "--data.tokenizer", str(self.work / "model")]
            return [*words, *(("--model.fresh", "--model.layers", "1") if warms else ())]
        sizes = {
            "layers": 1 if warms else case.layers or shape.layers, "width": shape.width, "heads": shape.heads,
            "ffn": shape.ffn, "kv-heads": shape.kv_heads, "context": shape.sequence,
            "vocab": self.shapes["1.2b"].vocab if warms else shape.vocab,
        }  # fmt: skip
        return ["--model", "llama", *(word for key, value in sizes.items() for word in (f"--model.{key}", str(value)))]

    def write_rows(self, prepared: Path, steps: int) -> float:
        """Writes the rows of each step, as meshwright reads them, for the loops by hand; returns documents a row."""
        shape, documents_a_row = self.shapes["1.2b"], 0.0
        for documents in (False, True):
            loader = Loader(
                TokenSet.open(prepared).train,
                rows=shape.rows,
                sequence=shape.sequence,
                seed=0,
                mask_documents=documents,
            )
            batches = [loader.batch(step) for step in range(steps)]
            rows = {
                name: np.stack([getattr(batch, name) for batch in batches]).astype(np.int32)
                for name in ("tokens", "targets", "positions")
            }
            np.savez(self.work / f"rows-{documents}.npz", **rows)
            if documents:
                documents_a_row = int((rows["positions"] == 0).sum()) / (steps * shape.rows)
        return documents_a_row

    def write_weights(self) -> None:
        """Draws the first weights of the 1.2B on the GPU and writes them, in bf16, with the model's configuration."""
        config, folder = self.shapes["1.2b"].config(), self.work / "model"
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = LlamaForCausalLM(config)
        config.save_pretrained(folder)
        weights = {name: weight.detach().to(torch.bfloat16).cpu() for name, weight in model.named_parameters()}
        save_file(weights, folder / "model.part", {"format": "pt"})
        os.replace(folder / "model.part", folder / "model.safetensors")
