"""Two processes that have one key notice each other by what the registry has of them."""

from __future__ import annotations

import anyio
import pytest
from tests.alongside import alongside, until
from tests.unit.control.shelf import ADDRESSES, NAMESPACE, BriefClock, Shelf, ShelfStore, registry_has

from shoal.clock import SystemClock
from shoal.control.records import StageRecord, VerifiedRecord
from shoal.control.registry import Registry
from shoal.identity import Identity


def _copies(*joined_s: float) -> tuple[list[Registry], list[str]]:
    """Two processes with one identity, which have joined some seconds ago; and what they notice, in order."""
    shelf: Shelf = {}
    identity, noticed, registries = Identity.generate(), list[str](), list[Registry]()
    for stage, (name, ago_s) in enumerate(zip("ab", joined_s, strict=True)):

        def copied(by: VerifiedRecord, yields: bool, name: str = name) -> None:
            assert by.peer == identity.peer_id
            noticed.append(f"{name} {'yields' if yields else 'notices'}")

        registry = Registry(ShelfStore(shelf, identity.peer_id), identity, NAMESPACE, 2, BriefClock(), copied=copied)
        registry.advertise(StageRecord(ADDRESSES, SystemClock().unix_s() - ago_s, stage=stage))
        registries.append(registry)
    return registries, noticed


def _shelf_of(registry: Registry) -> Shelf:
    assert isinstance(registry._store, ShelfStore)
    return registry._store._shelf


async def test_of_two_processes_with_one_identity_both_notice_and_the_younger_one_is_to_be_somebody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.registry.RENEW_S", 0.01)
    (older, younger), noticed = _copies(100.0, 50.0)
    async with alongside(older.run, younger.run):
        with older.membership.eager(), younger.membership.eager():
            await until(lambda: len(noticed) == 2)
    assert sorted(noticed) == ["a notices", "b yields"]
    # As long as both are there each knows where it is itself.
    for stage, registry in enumerate((older, younger)):
        assert [replica.stage for replica in registry.membership.view.replicas] == [stage]


async def test_where_the_younger_one_does_not_see_the_other_one_the_older_one_is_somebody_else_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal.control.registry.RENEW_S", 0.01)
    monkeypatch.setattr("shoal.control.copied_key._YIELD_S", 0.0)
    (older, younger), noticed = _copies(100.0, 50.0)
    async with alongside(older.run) as tasks:
        await registry_has(_shelf_of(older))
        with older.membership.eager():
            tasks.start_soon(younger._renew)
            await until(lambda: "a yields" in noticed)
    assert noticed in (["a yields"], ["a notices", "a yields"])


async def test_what_an_earlier_process_of_a_host_has_left_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    (gone, here), noticed = _copies(100.0, 0.0)
    async with alongside(gone.run):
        await registry_has(_shelf_of(gone))
    seen = anyio.Event()
    store = here._store
    get = store.get

    async def looked(topics: tuple[str, ...], holders: int | None, age_s: float) -> tuple[VerifiedRecord, ...]:
        found = await get(topics, holders, age_s)
        if found:
            seen.set()
        return found

    monkeypatch.setattr(store, "get", looked)
    async with alongside(here._watch):
        await seen.wait()
        await anyio.wait_all_tasks_blocked()
    assert noticed == []
