"""A launcher in a process of its own: starts roles, writes their process numbers as one JSON line, then waits;
if the fork server dies, it has the next one start a role and writes "again".

Arguments: the directory in which to make the run directory, modules to preload.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio

from shoal.runtime.launcher_messages import LauncherAnswer, RoleAsks, ScoutReady
from shoal.runtime.role_spec import RoleSpec
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor


async def main(parent: Path, *preload: str) -> None:
    again = anyio.Event()
    with RunDir(parent) as run_dir:
        async with Supervisor(run_dir=run_dir.path, preload=preload, notice=lambda _: again.set()) as supervisor:
            stubborn = await supervisor.start(RoleSpec("stubborn", 0, "roles:stubborn"))
            steady = await supervisor.start(RoleSpec("steady", 0, "roles:steady"))
            family = await supervisor.start(RoleSpec("parent", 0, "roles:parent"))
            await stubborn.ready()
            await steady.ready()
            said = await family.ready()
            assert isinstance(said, ScoutReady)
            children = said.configuration["children"]
            async for event in stubborn.events:
                if isinstance(event, RoleAsks):
                    stubborn.reply(event, LauncherAnswer())
                    break
            pids = [supervisor._keeper.pid, stubborn.pid, steady.pid, family.pid, *children]
            print(json.dumps({"pids": pids, "run_dir": str(run_dir.path)}), flush=True)
            await again.wait()
            await supervisor.start(RoleSpec("steady", 1, "roles:steady"))
            print("again", flush=True)
            await anyio.sleep_forever()


anyio.run(main, Path(sys.argv[1]), *sys.argv[2:], backend_options={"use_uvloop": True})
