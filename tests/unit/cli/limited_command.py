"""A command of shoal that takes no more memory for what strangers have made than 512 MiB; a process of its own."""

from __future__ import annotations

import sys

from shoal.cli import main
from shoal.runtime import own_limits

if __name__ == "__main__":
    own_limits._LEAST_BYTES, own_limits._SHARE = 512 << 20, 0.0
    sys.exit(main(sys.argv[1:]))
