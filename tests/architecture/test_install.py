from __future__ import annotations

from tools.install import pip_settings, uv_arguments

LISTING = """\
:env:.find-links='/mnt/wheels'
:env:.default-timeout='180'
download.find-links='/elsewhere'
global.find-links='/opt/wheels'
global.extra-index-url='https://a.example/simple https://b.example/simple'
global.index-url='https://global.example/simple'
install.index-url='https://install.example/simple'
"""


def test_of_pip_s_settings_the_more_particular_counts_and_those_of_other_commands_do_not() -> None:
    assert pip_settings(LISTING) == {
        "find-links": "/mnt/wheels",
        "default-timeout": "180",
        "extra-index-url": "https://a.example/simple https://b.example/simple",
        "index-url": "https://install.example/simple",
    }


def test_uv_looks_for_packages_where_pip_does() -> None:
    told = " ".join(uv_arguments(pip_settings(LISTING)))
    assert "--default-index https://install.example/simple" in told
    assert "--index https://a.example/simple --index https://b.example/simple" in told
    assert "--find-links /mnt/wheels" in told


def test_without_a_configuration_uv_is_told_nothing_of_places() -> None:
    assert list(uv_arguments(pip_settings(""))) == ["--index-strategy", "unsafe-best-match"]
