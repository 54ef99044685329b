"""A run begins from the weights of an earlier run's export, on hosts that have them, have others or have none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.e2e.hosts import hosts_of, invited
from tests.e2e.launched import completed, run_shoal
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_namespaces]

_SIZES = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_TRAINED = {
    "wandb": False,
    "data": {"seq_len": 64, "holdout_fraction": 0.005},
    "model_pipeline": {"stages": 2, "microbatches": 2},
    "diloco": {"inner_steps": 4, "outer_steps": 2, "batch_size_per_step": 4},
    "servers": {"replicas": 2},
}


def _file(path: Path, model: dict[str, object]) -> str:
    path.write_text(yaml.safe_dump({**_TRAINED, "model": {"family": "hf", **model}}))
    return f"--config-path={path}"


def test_hosts_that_have_not_the_weights_or_have_others_begin_from_those_of_the_client_s_host(tmp_path: Path) -> None:
    first = completed(tmp_path, _file(tmp_path / "first.yaml", {"extra": _SIZES}), "--servers.replicas=1")
    with lan("client", "bare", "flipped") as network, hosts_of(tmp_path / "hosts", network) as hosts:
        for host in ("client", "flipped"):
            hosts.home(host).mkdir(parents=True, exist_ok=True)
            run_shoal("export", str(first.log_dir), "--to", str(hosts.home(host) / "mine"))
        _flip_a_bit(hosts.home("flipped") / "mine" / "model.safetensors")
        flag = _file(tmp_path / "second.yaml", {"name_or_path": "~/mine", "pretrained": True})
        client = hosts.run("client", "start_trainer_client.py", flag, "--num-servers=2")
        variable, command = invited(client)
        one = [part if part != "2" else "1" for part in command]
        for host in ("bare", "flipped"):
            hosts.give_key("client", host)
        servers = {host: hosts.run(host, *one, environment=variable) for host in ("bare", "flipped")}
        assert client.ends(200.0) == 0, client.output
        for run in servers.values():
            assert run.ends(60.0) == 0, run.output
        summary = client.summary()
        assert summary["eval_loss_first"] == pytest.approx(first.summary()["eval_loss_last"], abs=1e-6)
        assert (summary["duplicates"], summary["missing"]) == (0, 0)
        assert "come from peers: model.name_or_path = ~/mine: there is no such folder" in servers["bare"].output
        assert "the run began from other weights" in servers["flipped"].output
        client.leaves_nothing()


def _flip_a_bit(path: Path) -> None:
    """In some value of every tensor, so that whichever stage a server has, it is another one."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    for name, place in json.loads(content[8 : 8 + size]).items():
        if name != "__metadata__":
            content[8 + size + place["data_offsets"][0]] ^= 1
    path.write_bytes(content)
