"""Makes tokens as `shoal.data.token_maker` does, and stops itself before; a process of its own."""

from __future__ import annotations

import os
import signal

from shoal.data.token_maker import main

if __name__ == "__main__":
    os.kill(os.getpid(), signal.SIGSTOP)
    main()
