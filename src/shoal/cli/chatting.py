"""`shoal chat`: a conversation with a model, by the chat template of its tokenizer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.cli.arguments import Wording
from shoal.cli.exporting import opened
from shoal.cli.output import without_controls
from shoal.cli.trained import request_of, whole
from shoal.errors import ConfigError
from shoal.inference.conversation import OngoingConversation
from shoal.inference.generation import Continuation, require_generates
from shoal.inference.text import tokens_of
from shoal.model.hf.chat import ChatTemplate
from shoal.quant.fold import fold_weights
from shoal.runtime.own_limits import within_free_memory


def chat(
    model: Path,
    messages: Sequence[str],
    *,
    system: str,
    wording: Wording,
    family: str | None,
    device: str,
    as_json: bool,
) -> None:
    """Print what a model answers to messages, each as it comes.

    Args:
        messages: none: the lines of standard input are, until it ends.
        wording: without a seed one is drawn.

    Raises:
        ConfigError: this is no folder of a model that talks, or what is wanted makes no sense.
        ShoalError: the model cannot be read, or its template refuses a message.
    """
    wanted = request_of("?", wording)
    with opened(model, family) as source:
        if source.tokenizer is None:
            raise ConfigError(
                f"{model} has no tokenizer, and so no chat template that makes a text of messages: it goes on from a "
                "text by `shoal generate`"
            )
        template = ChatTemplate(source.tokenizer, str(source.tokenizer))
        module = whole(source, device)
        require_generates(module, str(model))
        tokens = tokens_of(source, module, is_templated=True)
        context = source.context or module.input_spec.shape[0]
    fold_weights(module)
    conversation = OngoingConversation(template, tokens, context, system)
    is_terminal = sys.stdout.isatty()
    # As of `shoal generate`: neither tokenizer nor template is ours.
    with within_free_memory():
        for message in messages or _typed():
            forgotten = conversation.num_forgotten
            request = replace(wanted, prompt=conversation.ask(message))
            if conversation.num_forgotten > forgotten:
                print(f"the context of {context} tokens is full: the oldest messages are forgotten", file=sys.stderr)
            answer = Continuation(module, tokens, request, context=context)
            said = ""
            for text in answer:
                said += text
                if not as_json:
                    print(without_controls(text) if is_terminal else text, end="", flush=True)
            conversation.answered(said)
            if as_json:
                report = {"text": said, "tokens": answer.tokens, "prompt_tokens": answer.prompt_tokens}
                print(json.dumps({**report, "finish": answer.finish, "seed": wanted.sampling.seed}), flush=True)
            else:
                print(flush=True)
            if answer.finish == "context":
                print("the context of the model is full", file=sys.stderr)
    if wanted.sampling.temperature and wording.seed is None:
        print(f"--seed {wanted.sampling.seed} gives the same again", file=sys.stderr)


def _typed() -> Iterator[str]:
    """Yield what a person types, or what a pipe has, line by line; what is empty is left out."""
    # A byte that is no text is refused with the message that it is in.
    if reconfigure := getattr(sys.stdin, "reconfigure", None):
        reconfigure(errors="surrogateescape")
    is_asked = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if is_asked else "")
        except EOFError:
            return
        if line.strip():
            yield line
