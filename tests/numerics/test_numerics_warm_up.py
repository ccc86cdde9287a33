"""After a warm-up with what a model needs, its steps compile and load nothing more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a process of its own: what another test compiled would hide what is missing.
_SCRIPT = """
import sys
import torch
from numba.core.dispatcher import Dispatcher
from headwater.model.catalogue import ToyLocation
from headwater.model.load import load_model
from headwater.model.toy_source import ToyOptions
from headwater.numerics import cpu_team
from headwater.numerics.cpu import CpuOps
from headwater.numerics.ops import KVFormat, WeightFormat
from tests.numerics.numerics_cases import case_of

kernels = []
make = cpu_team.cfunc
def counted(*arguments, **options):
    kernels.append(arguments)
    return make(*arguments, **options)
cpu_team.cfunc = counted

def num_ready():
    found = {
        id(one): len(one.overloads)
        for name, module in list(sys.modules.items())
        if name.startswith("headwater.numerics")
        for one in vars(module).values()
        if isinstance(one, Dispatcher)
    }
    return len(kernels) + sum(found.values())

family, warms_up = sys.argv[1], sys.argv[2] == "stated"
ops = CpuOps(2)
options = ToyOptions.parse(f"family={family}")
location = ToyLocation(options=options, model_id="toy")
model = load_model(location, ops, WeightFormat.BF16).model
ops.warm_up(model.needs if warms_up else ())
before = num_ready()
kv = {}
for group in model.cache_plan:
    for layer in group.layers:
        kv[layer] = (
            ops.allocate_rows(64, 16, group.head_dim, KVFormat.BF16, group.ratio)
            if group.is_rows
            else ops.allocate_kv(64, 16, group.num_kv_heads, group.head_dim, KVFormat.BF16)
        )
layers = tuple(kv[number] for number in sorted(kv))
steps = [[(300, 300)], [(40, 340)], [(1, 341)], [(1, 342)]]
steps += 2 * [[(1, 20), (1, 130), (1, 99)]] + [[(1, 5)] * 40, [(30, 90), (1, 33)]]
for rows in steps:
    batch = case_of(rows, 16, torch.Generator().manual_seed(1)).batch
    hidden = model.forward(torch.ones(batch.positions.shape[0], dtype=torch.int64), batch, layers)
    model.logits(hidden[-1:])
print(num_ready() - before)
"""


def _compiled_later(family: str, needs: str) -> int:
    command = [sys.executable, "-c", _SCRIPT, family, needs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("family", ["llama", "gemma3", "ced"])
def test_steps_after_a_warm_up_with_stated_needs_compile_nothing(family: str) -> None:
    assert _compiled_later(family, "stated") == 0


def test_what_was_not_stated_is_compiled_when_it_is_called() -> None:
    assert _compiled_later("ced", "none") > 0
