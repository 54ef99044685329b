"""An object store on this machine, which moto emulates."""

from __future__ import annotations

import contextlib
import urllib.request
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KEY, SECRET = "AKIATHEKEYOFATEST", "the+secret/of+a+test"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Bucket(NamedTuple):
    """One that is empty.

    Attributes:
        environment: With which the AWS tools, and programs that look where they do, find it.
    """

    location: str
    environment: Mapping[str, str]


@contextlib.contextmanager
def bucket() -> Iterator[Bucket]:
    """Give a bucket of a store that is served as long."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint, name = f"http://{host}:{port}", f"bucket-{port}"  # what is in buckets outlives a server of moto
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT")):
            pass
        yield Bucket(f"s3://{name}/a/prefix", {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint})
    finally:
        server.stop()
