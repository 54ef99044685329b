"""A package of which parts are imported, and not the package itself.

Of hivemind shoal needs the DHT alone, but `import hivemind.dht` executes `hivemind/__init__.py` first: its averaging,
experts and optimizers, and with them scipy's. So the package is in `sys.modules` before that, and not yet executed.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec


def defer_package(name: str) -> None:
    """Have a package be executed only when somebody asks it for a name that it does not have yet.

    It does nothing where the package was imported before, and where it is not installed: who imports it is told that.

    Args:
        name: of a package that is in no other one.
    """
    if name in sys.modules:
        return
    spec = find_spec(name)
    if spec is None or spec.loader is None:
        return
    package, loader = module_from_spec(spec), spec.loader

    def execute(wanted: str) -> object:
        """Answer for a name that is not there (PEP 562)."""
        # Whoever goes through all modules asks each for names of Python's own; a part that is being imported is no
        # attribute yet, and `import` knows that.
        if not wanted.startswith("__") and f"{name}.{wanted}" not in sys.modules:
            if vars(package).get("__getattr__") is execute:
                del vars(package)["__getattr__"]
                loader.exec_module(package)
            if wanted in vars(package):
                return vars(package)[wanted]
        raise AttributeError(f"module {name!r} has no attribute {wanted!r}")

    vars(package)["__getattr__"] = execute
    sys.modules[name] = package
