"""What an object store is asked for comes to an end, whatever it answers: a listing, an answer, an object's bytes.

    listing   at most `MAX_ENTRIES`, in `_MAX_PAGES` and `_LISTING_S`
    answer    at most `_MAX_ANSWER_BYTES`, within `_ANSWER_S` (and the time that what is sent with it may take)
    content   what was asked for and no more, `_PART_BYTES` of it in each `_PART_S`

The libraries bound the silence between two bytes only: a store that drips them, or sends them without end, would keep a
run waiting, or fill its memory.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, cast

import anyio

from shoal.clock import SystemClock
from shoal.errors import StorageError

MAX_ENTRIES: Final = 20_000
"""Files and folders of one prefix: the runs at a place, or the files of a checkpoint."""
_MAX_PAGES: Final = 1_000
_LISTING_S: Final = 600.0
_MAX_ANSWER_BYTES: Final = 16 << 20
"""A page of a thousand names of a kilobyte each has a tenth of that."""
_ANSWER_S: Final = 120.0
_PART_BYTES: Final = 1 << 20
_PART_S: Final = 120.0
_SLOWEST_BYTES_PER_S: Final = 16 * 1024
"""Of what is sent to the store."""


def bounded_session(*arguments: Any, **options: Any) -> Any:
    """Return a session of aiobotocore whose answers end: in bytes and in time."""
    session = importlib.import_module("aiobotocore.httpsession").AIOHTTPSession(*arguments, **options)
    session.send = partial(_send, session.send)
    return session


async def _send(send: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
    """Send a request, and read its answer here, unless it is the content of an object, which `content_of` reads."""
    is_content, request.stream_output = request.stream_output, True
    headers = request.headers
    sent_bytes = int(headers.get("X-Amz-Decoded-Content-Length") or headers.get("Content-Length") or 0)
    try:
        with _within(_ANSWER_S + sent_bytes / _SLOWEST_BYTES_PER_S, "a whole answer"):
            answer = await send(request)
            if not is_content or answer.status_code >= 300:
                answer._content = await _whole(answer.raw)
    finally:
        request.stream_output = is_content
    return answer


async def _whole(response: Any) -> bytes:
    content = bytearray()
    try:
        while part := await response.content.read(_PART_BYTES):
            content += part
            if len(content) > _MAX_ANSWER_BYTES:
                raise OSError(errno.EFBIG, f"an answer has more than {_MAX_ANSWER_BYTES} bytes")
    except BaseException:  # also where it is cancelled, what is left of the answer is not waited for
        response.close()
        raise
    return bytes(content)


def listing(store: Any, path: str) -> list[dict[str, Any]]:
    """Return what is directly below a prefix, as S3 says it: `Prefix` of a folder; `Key` and more of a file.

    Raises:
        StorageError: There is too much, or it takes too long.
    """
    bucket, key, _ = store.split_path(path)
    clock = SystemClock()
    until_s = clock.now_s() + _LISTING_S
    found: list[dict[str, Any]] = []
    where: dict[str, str] = {"Prefix": f"{key}/" if key else ""}
    for _ in range(_MAX_PAGES):
        page = cast("dict[str, Any]", store.call_s3("list_objects_v2", Bucket=bucket, Delimiter="/", **where))
        found += page.get("CommonPrefixes", [])
        found += page.get("Contents", [])
        if len(found) > MAX_ENTRIES:
            break
        following = page.get("NextContinuationToken")
        if not page.get("IsTruncated") or not following:
            return found
        where["ContinuationToken"] = following
        if clock.now_s() > until_s:
            raise StorageError(f"{path} was not listed to its end within {_LISTING_S:.0f} s: the store is too slow")
    raise StorageError(
        f"the store lists more than {MAX_ENTRIES:,} entries directly in {path}, or does not come to an end: name a "
        "prefix with fewer, or look at what answers there"
    )


def content_of(store: Any, path: str, most_bytes: int) -> bytes:
    """Return the first bytes of an object, `most_bytes` or all that it has; what a store sends beyond is not read.

    Raises:
        OSError: It does not come, or too slowly.
    """
    bucket, key, _ = store.split_path(path)
    answer = store.call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes=0-{most_bytes - 1}")
    return cast("bytes", importlib.import_module("fsspec.asyn").sync(store.loop, _read, answer["Body"], most_bytes))


async def _read(body: Any, most_bytes: int) -> bytes:
    parts: list[bytes] = []
    left_bytes = most_bytes
    try:
        while left_bytes:
            part = await _part(body, min(left_bytes, _PART_BYTES))
            if not part:
                break
            parts.append(part)
            left_bytes -= len(part)
    finally:
        body.close()
    return b"".join(parts)


async def _part(body: Any, num_bytes: int) -> bytes:
    """Return the next bytes; fewer: there are no more."""
    part = bytearray()
    with _within(_PART_S, f"{num_bytes} bytes of an object"):
        while len(part) < num_bytes and (more := await body.read(num_bytes - len(part))):
            part += more
    return bytes(part)


@contextmanager
def _within(time_s: float, what: str) -> Generator[None]:
    """Raises OSError with what has not come in this time; no TimeoutError, whose words fsspec does not pass on."""
    with anyio.move_on_after(time_s) as waiting:
        yield
    if waiting.cancelled_caught:
        raise OSError(errno.ETIME, f"{what} did not come within {time_s:.0f} s")
