"""Samples: the data set, leases, and those who prepare batches."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event


class DatasetOpened(Event, frozen=True, tag="dataset.opened"):
    """The data server has opened the data set."""

    dataset: str
    num_train: int
    num_holdout: int


class DatasetWanted(Event, frozen=True, tag="dataset.wanted"):
    """No folder or file here has the name of the data set, so that it is asked for on the Hugging Face hub.

    Attributes:
        near: a data set that shoal carries and whose name is like this one; empty: there is none.
    """

    dataset: str
    near: str = ""

    def say(self) -> str:
        """Return the sentence."""
        meant = f"; if you mean {self.near}, which needs no network, say so" if self.near else ""
        return f"nothing here is called {self.dataset}: asking the Hugging Face hub for it{meant}"


class DatasetOpening(Event, frozen=True, tag="dataset.opening"):
    """The data server is still opening the data set: said again and again, until it can be trained on.

    Attributes:
        files: in the folder, as far as they are counted (`counted`: all of them); None: it is no folder of this host.
    """

    dataset: str
    files: int | None
    counted: bool
    elapsed_s: int

    def say(self) -> str:
        """Return the sentence."""
        files = "" if self.files is None else f", {self.files:,} files{'' if self.counted else ' and more'}"
        return f"opening the data set {self.dataset}{files} (for {self.elapsed_s} s)"


class ClassesAsked(Event, frozen=True, tag="classes.asked"):
    """The images that are here are looked at for the names of their classes, by a package that is slow to load."""

    dataset: str

    says = "looking at the images of {dataset} for their classes, which takes some seconds at least"


class DataServerDialledAgain(Event, frozen=True, tag="data_server.dialled_again"):
    """A trainer dials the lost data server, says what it holds, and asks again for what is missing."""

    held: int
    waiting: int


class DataAwaited(Event, frozen=True, tag="data.awaited"):
    """Nothing has been trained for a while for want of samples; said again and again. No round ends meanwhile."""

    level = WARNING
    says = "training has stood still for {waited_s} s: no samples come from the data server"
    why = "The data server is being started again, or the disk, network or stream that it reads from gives nothing."
    do = "Nothing is lost, and it goes on with the first samples; `shoal logs` has what the data server says."
    waited_s: int


class LeaseDenied(Event, frozen=True, tag="lease.denied"):
    """A trainer gets no batch for a step."""

    round: int
    step: int
    reason: str


class SamplesRecorded(Event, frozen=True, tag="samples.recorded"):
    """The data server knows which samples the record of a round has trained; leases of others have ended."""

    round: int
    leases_ended: int


class TrainerReleased(Event, frozen=True, tag="trainer.released"):
    """The leases of a dead trainer have ended."""

    trainer: int
    leases: int


class TrainerResumed(Event, frozen=True, tag="trainer.resumed"):
    """A trainer has told a data server that was started again what it has leased."""

    trainer: int
    leases: int


class DataWorkerDied(Event, frozen=True, tag="data_worker.died"):
    """A process that prepares batches has died; another one takes its place."""

    level = WARNING
    index: int
    pid: int
    status: str


class DataProcessStopped(Event, frozen=True, tag="data_process.stopped"):
    """A process that prepares batches, or reads a stream, stands still; it is killed, and another one does its work."""

    level = WARNING
    says = "{what} stands still (process {pid} is stopped): it is killed, and another one does its work"
    why = "It was sent SIGSTOP: by hand, by a debugger, or by what saves energy or memory."
    do = "Nothing is lost; if it happens again and again, find what stops it."
    what: str
    pid: int


class DataWorkerSlow(Event, frozen=True, tag="data_worker.slow"):
    """A process, the data server's own where it has no workers, has not prepared a batch within a minute; said once for
    each batch, which is waited for."""

    level = WARNING
    why = "A disk or a network does not answer, or the code that reads the samples waits for something."
    do = "See what the process waits for (`py-spy dump --pid`); if it is killed, another one prepares the batch anew."
    dataset: str
    index: int
    pid: int
    samples: int
    seconds: float


class TokensStopped(Event, frozen=True, tag="tokens.stopped"):
    """The process that makes tokens stands still. It is not killed: what it has made would be lost."""

    level = WARNING
    says = "the process that makes tokens stands still (process {pid} is stopped), and the run waits for it"
    why = "It was sent SIGSTOP: by hand, by a debugger, or by what saves energy or memory."
    do = "Let it go on by `kill -CONT` with its number."
    pid: int


class TokensAwaited(Event, frozen=True, tag="tokens.awaited"):
    """Another process of this host makes the same tokens, and is waited for."""

    says = "another process of this host makes the tokens of {dataset}, and is waited for"
    do = "If it has been stopped, let it go on or end it: it has the lock {lock}."
    dataset: str
    lock: str


class TokensProgress(Event, frozen=True, tag="tokens.progress"):
    """Text is made into tokens, which is done once and kept on the disk."""

    dataset: str
    percent: float | None
    mb_per_s: float
    left_s: float | None

    def say(self) -> str:
        known = "" if self.percent is None else f", {self.percent} %, {self.left_s} s left"
        return f"making tokens of {self.dataset}: {self.mb_per_s} MB/s{known}"


class TokensBuilt(Event, frozen=True, tag="tokens.built"):
    """Text was made into tokens; the next start finds them on the disk."""

    says = "{dataset} has {tokens} tokens, of {text_bytes} bytes in {documents} documents ({seconds} s)"
    dataset: str
    tokens: int
    text_bytes: int
    documents: int
    seconds: float
    path: str


class TokensDamaged(Event, frozen=True, tag="tokens.damaged"):
    """Tokens that were kept on the disk are not as they were written; they are made again."""

    level = WARNING
    says = "kept tokens are damaged: {reason}"
    why = "The disk is not sound, or somebody has written there."
    do = "They are made again."
    reason: str


class DocumentsSkipped(Event, frozen=True, tag="documents.skipped"):
    """Documents that cannot be read, or are no text, are left out of the data set."""

    level = WARNING
    says = "{skipped} of {documents} documents of {dataset} are left out; the first ones: {first}"
    why = "They cannot be read or are no text."
    do = "Mend them, or leave them out of the data set; data.max_bad_fraction says how many are too many."
    dataset: str
    skipped: int
    documents: int
    first: str


class ClipsLeftOut(Event, frozen=True, tag="clips.left_out"):
    """Clips of audio that cannot be read, have no transcript or are too long are left out of the data set."""

    level = WARNING
    says = "{bad} bad and {long} too long of {clips} clips of {dataset} are left out, such as {first}"
    why = "They cannot be read, have no transcript, or are longer than data.max_audio_s or data.max_characters."
    do = "Mend them; data.max_bad_fraction says how many bad ones are too many."
    dataset: str
    bad: int
    long: int
    clips: int
    first: str


class SamplesUnknown(Event, frozen=True, tag="samples.unknown"):
    """Records of the run name samples that the data of this host do not have; nobody is given these."""

    level = WARNING
    says = "records name {samples} samples that are not in the data, which have {num_train}"
    why = "A server has said that it has trained on them, or this host has other data than the run began with."
    do = "Compare the data with those of the host that has begun the run; see the logs for replica.out."
    samples: int
    num_train: int


class SampleSkipped(Event, frozen=True, tag="sample.skipped"):
    """A sample cannot be read; wherever it is its turn, the next one that can be read stands in its place."""

    dataset: str
    which: str
    reason: str


class SamplesSkipped(Event, frozen=True, tag="samples.skipped"):
    """Samples cannot be read; others stand in their places. Said of the first, and each time they are twice as many."""

    level = WARNING
    says = "{skipped} of {samples} samples of {dataset} cannot be read; the last one is {which}: {reason}"
    why = "Their files are damaged, or the code that reads them raises an error."
    do = "Mend them, or leave them out of the data set; data.max_bad_fraction says how many are too many."
    dataset: str
    skipped: int
    samples: int
    which: str
    reason: str


class TokenizerTraining(Event, frozen=True, tag="tokenizer.training"):
    """A tokenizer is trained on the first part of the text, which is done once and kept on the disk."""

    says = "training a tokenizer of {tokens} tokens on {dataset}"
    dataset: str
    tokens: int


class StreamWindow(Event, frozen=True, tag="stream.window"):
    """Samples of a stream are on this host, ready to be trained on, or are there again.

    Attributes:
        rows: of the stream that it took up to here, of which `skipped` could not be read.
        sha256: of the samples, hexadecimal.
    """

    dataset: str
    window: int
    rows: int
    skipped: int
    sha256: str


class StreamCompared(Event, frozen=True, tag="stream.compared"):
    """A stream that was read anew is the one that the run has trained on: all windows that the run has marked are the
    same here."""

    dataset: str
    windows: int


class StreamRepeats(Event, frozen=True, tag="stream.repeats"):
    """A stream has ended, and is read from its beginning on again."""

    says = "{dataset} has ended after {rows} rows, and begins anew (repeat {repeat})"
    dataset: str
    repeat: int
    rows: int
