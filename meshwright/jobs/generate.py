"""The job ``generate``: continues a prompt with a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.data.chat_template import Conversation
from meshwright.data.tokenizer import chat_template, given_tokenizer
from meshwright.errors import ConfigError
from meshwright.jobs.progress import Say, to_stderr
from meshwright.jobs.trained_model import open_trained, tokenizer_folder


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateResult:
    """A prompt and how a model continued it."""

    prompt: str
    """As it was given."""
    text: str
    """The continuation alone."""

    def to_json(self) -> dict[str, str]:
        """Returns ``prompt`` and ``text``."""
        return {"prompt": self.prompt, "text": self.text}


def generate(
    source: str | Path,
    prompt: str,
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    chat: bool = False,
    trust: bool = False,
    say: Say = to_stderr,
) -> GenerateResult:
    """Continues a prompt with a run's newest whole checkpoint, or with a Hugging Face directory.

    Args:
        source: the directory.
        prompt: text to go on from, or with ``chat`` what a user says.
        max_tokens: tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest tokens.
        seed: of the draws.
        chat: write the prompt by the tokenizer's chat template, and answer it.
        trust: import and call the function that a run's config names as its model.
        say: takes a line for each checkpoint that was passed over.

    Raises:
        ConfigError: when the directory is neither, or names code and isn't trusted, or has no chat template.
        CheckpointError: when a run has no checkpoint yet.
    """
    model = open_trained(Path(source), trust, say)
    written, answer_end = _written_as_chat(Path(source), prompt) if chat else (prompt, "")
    text = model.complete(
        written,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        # A template writes all of them itself.
        add_special_tokens=not chat,
        end=answer_end,
    )
    return GenerateResult(prompt=prompt, text=text)


def _written_as_chat(source: Path, prompt: str) -> tuple[str, str]:
    """Writes what a user says by the tokenizer's chat template.

    Returns:
        the text, with what an answer begins with; what the template writes behind an answer.
    """
    template = chat_template(given_tokenizer(str(tokenizer_folder(source))), "")
    if template is None:
        raise ConfigError(f"chat: the tokenizer of {source} has no chat template; leave it out, and prompt with text")
    said = Conversation(messages=[{"role": "user", "content": prompt}])
    return template.render(said, prompt=True)[0], template.answer_end(prompt)
