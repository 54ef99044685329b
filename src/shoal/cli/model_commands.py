"""The commands on a model that a folder holds: it is exported, imported, measured, and asked for text or classes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.cli.arguments import AsJson, Switch, Wording

ModelFolder = Annotated[
    Path,
    Parameter(
        help="logs/<run_id> or the model in it, a checkpoint (round_000012), an export, an import, or a folder of "
        "transformers with weights."
    ),
]
FamilyName = Annotated[
    str | None,
    Parameter(help="Of a model whose family is your own code, package.module:Class: that it may run here."),
]
DatasetName = Annotated[
    str | None,
    Parameter(help="Of data that is a class of your own, package.module:Class: that it may run here."),
]
ComputeDevice = Annotated[str, Parameter(help="Where it computes: auto, cpu, or a GPU such as cuda:0.")]
_USUAL_WORDING = Wording()
Force = Annotated[bool, Switch, Parameter(help="Replace a model that is there already.")]


def checkpoints(
    location: Annotated[
        str, Parameter(name="DIR", help="A folder with checkpoints of runs, or of one run; or s3://bucket/prefix.")
    ] = "logs/checkpoints",
    *,
    as_json: AsJson = False,
) -> None:
    """Read the checkpoints at a place, and list them: round, time, size, whether every byte is as it was written."""
    from shoal.cli.checkpoints import list_checkpoints

    list_checkpoints(location, as_json=as_json)


def export_model(
    model: ModelFolder,
    *,
    to: Annotated[Path, Parameter(help="The folder that is written.")],
    format_: Annotated[
        Literal["hf", "safetensors", "integers", "peft"] | None,
        Parameter(
            name="--format",
            help='"hf": a model of transformers; "peft": its adapters; "safetensors": a state dict with config.yaml; '
            '"integers": the same with integers and scales of weights that were trained with quantisation; else what '
            "fits.",
        ),
    ] = None,
    merge: Annotated[
        bool, Parameter(negative="", help="Write a model with adapters as one without, with what they add in it.")
    ] = False,
    family: FamilyName = None,
    force: Force = False,
) -> None:
    """Write a model as other programs load it: a gpt as a GPT-2 of transformers, with its tokenizer, adapters for peft.

    What is written is read back and compared before it is put into place. Weights that were trained with quantisation
    are written as what they are rounded to, or as its integers and scales.
    """
    from shoal.cli.exporting import export_folder

    export_folder(model, to, format_, family, force=force, merge=merge)


def import_model(
    model: Annotated[Path, Parameter(help="A folder with a GPT-2 of transformers, its weights as safetensors.")],
    *,
    to: Annotated[Path, Parameter(help="The folder that is written.")],
    force: Force = False,
) -> None:
    """Write a GPT-2 of transformers as a model of the family gpt, one stage after the other."""
    from shoal.cli.exporting import import_folder

    import_folder(model, to, force=force)


def evaluate(
    model: ModelFolder,
    *,
    family: FamilyName = None,
    dataset_name: DatasetName = None,
    eval_split: Annotated[
        str | None, Parameter(help="A split, or a folder or file with a / in it, in place of what the run held out.")
    ] = None,
    device: ComputeDevice = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure the eval loss of a model, on the data of its own configuration: what its run has evaluated last.

    With --eval-split it is measured on other data of the same kind. Of images also the share that it names rightly, of
    speech the character error rate and what it hears in some clips.
    """
    from shoal.cli.trained import evaluate as serve

    serve(model, family, device, dataset_name=dataset_name, eval_split=eval_split, as_json=as_json)


def generate(
    model: ModelFolder,
    *,
    prompt: Annotated[str, Parameter(help="The text to go on from.", allow_leading_hyphen=True)],
    wording: Wording = _USUAL_WORDING,
    stop: Annotated[
        list[str] | None,
        Parameter(negative=(), help="A text that ends it and is not printed; can be given several times."),
    ] = None,
    family: FamilyName = None,
    device: ComputeDevice = "cpu",
    dtype: Annotated[
        Literal["float32", "float64"], Parameter(help="float32 or float64: in which it computes.")
    ] = "float32",
    as_json: Annotated[
        bool, Switch, Parameter(name="--json", help="Print one JSON object with the text, its tokens and why it ended.")
    ] = False,
) -> None:
    """Print what a model says after a prompt, as it comes.

    A folder of transformers speaks by the tokenizer.json in it, a model that was trained here by its run's
    tokenizer, or by bytes.
    """
    from shoal.cli.trained import generate as serve

    serve(
        model,
        prompt,
        wording=wording,
        stops=tuple(stop or ()),
        family=family,
        device=device,
        dtype=dtype,
        as_json=as_json,
    )


def chat(
    model: ModelFolder,
    *,
    message: Annotated[
        list[str] | None,
        Parameter(
            negative=(),
            allow_leading_hyphen=True,
            help="What to say, can be given several times; else each line of standard input is a message.",
        ),
    ] = None,
    system: Annotated[str, Parameter(help="What the model is told before.", allow_leading_hyphen=True)] = "",
    wording: Wording = _USUAL_WORDING,
    family: FamilyName = None,
    device: ComputeDevice = "cpu",
    as_json: Annotated[
        bool, Switch, Parameter(name="--json", help="Print a JSON object for each answer, with why it ended.")
    ] = False,
) -> None:
    """Talk with a chat model: it answers each message, and knows those before.

    Messages become text by the chat template of its tokenizer; when its context is full, the oldest are forgotten.
    Ctrl-D ends it.
    """
    from shoal.cli.chatting import chat as serve

    serve(
        model,
        message or (),
        system=system,
        wording=wording,
        family=family,
        device=device,
        as_json=as_json,
    )


def classify(
    model: ModelFolder,
    *images: Annotated[Path, Parameter(help="Files with an image each.")],
    top: Annotated[int, Parameter(help="So many classes of each image, the likeliest first.")] = 3,
    family: FamilyName = None,
    device: ComputeDevice = "cpu",
    as_json: AsJson = False,
) -> None:
    """Say of images which classes a model sees in them, with their probabilities.

    Images are decoded and resized as those that it was trained on, a folder with one for each class or a data set of
    the hub. Exit code 1 if a file is no image; the others are classified.
    """
    from shoal.cli.classifying import classify as serve

    serve(model, images, top=top, family=family, device=device, as_json=as_json)


def images(
    model: ModelFolder,
    *,
    to: Annotated[Path, Parameter(help="The PNG file that is written.")],
    rows: Annotated[int, Parameter(help="Images of each class.")] = 8,
    first_class: Annotated[int, Parameter(help="The class of the first column.")] = 0,
    classes: Annotated[int | None, Parameter(help="Columns; else 10, or as many as there are classes.")] = None,
    scale: Annotated[int, Parameter(help="Each pixel becomes a square of so many.")] = 4,
    seed: Annotated[int, Parameter(help="The same seed gives the same images.")] = 0,
    device: ComputeDevice = "cpu",
    force: Annotated[bool, Switch, Parameter(help="Replace a file that is there already.")] = False,
) -> None:
    """Write images that a model makes (biggan) as one PNG: a column for each class; rows differ in their noise.

    Needs Pillow (pip install 'shoal[hf]').
    """
    from shoal.cli.trained import images as serve

    serve(
        model,
        to,
        rows=rows,
        first_class=first_class,
        classes=classes,
        scale=scale,
        seed=seed,
        device=device,
        force=force,
    )
