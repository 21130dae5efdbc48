"""Memory by formula: ZeRO's states compared with DeepSpeed's estimates, and its buckets."""

import pytest
from support.planning import NO_PEAK

from fabric_ladder.techniques.memory import Counts
from fabric_ladder.techniques.zero_memory import with_zero

COUNTS = Counts(all=10_000, trained=10_000, largest_layer=700, linear=0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_zeros_states_agree_with_deepspeeds_own_estimates(ranks):
    stage_2 = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2").estimate_zero2_model_states_mem_needs
    stage_3 = pytest.importorskip("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs
    names = ("live_parameters", "reuse_distance")
    none = {"reduce_bucket_size": 0, "sub_group_size": 0}
    none |= {f"stage3_max_{name}": 0 for name in names}
    cpu = {"device": "cpu"}

    def mine(**config):
        peak = with_zero(NO_PEAK, COUNTS, none | config, "adam", ranks)
        return peak.host * ranks, peak.total

    assert mine(stage=2)[1] == stage_2(10_000, ranks, 1, cpu_offload=False)[1]
    host, device = stage_2(10_000, ranks, 1, cpu_offload=True)
    assert mine(stage=2, offload_optimizer=cpu)[0] == pytest.approx(host, abs=4)
    assert mine(stage=2, offload_optimizer=cpu)[1] == max(device + 4 * 700, device + 20_000 / ranks)
    assert mine(stage=3)[1] == stage_3(10_000, 700, ranks, 1, False, False, False)[1]
    estimate = stage_3(10_000, 700, ranks, 1, True, False, False)[:2]
    assert mine(stage=3, offload_optimizer=cpu) == pytest.approx(estimate, abs=4)
    estimate = stage_3(10_000, 700, ranks, 1, True, True, False)[:2]
    assert mine(stage=3, offload_optimizer=cpu, offload_param=cpu) == pytest.approx(estimate, abs=4)
    assert mine(stage=1)[1] == 20_000 + 60_000 + 120_000 / ranks
    alone = mine(stage=3, offload_optimizer=cpu, offload_param=cpu)[1]
    for name in names:
        kept = {f"stage3_max_{name}": 1_000}
        assert mine(stage=3, offload_optimizer=cpu, offload_param=cpu, **kept)[1] == alone + 2_000
    assert mine(stage=3, sub_group_size=1_000)[1] == mine(stage=3)[1] + 4_000, "its gradients again, in 32 bits"


SIZE = 3_000


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"stage": 1}, 4 * SIZE + 2 * SIZE),
        ({"stage": 2}, 2 * SIZE + 2 * SIZE),
        ({"stage": 2, "overlap_comm": True}, 2 * 2 * SIZE + 2 * SIZE),
        ({"stage": 2, "allgather_bucket_size": 5e8}, 2 * SIZE + 2 * SIZE),
        ({"stage": 3, "overlap_comm": True}, 2 * SIZE + 2 * SIZE),
        ({"stage": 3, "reduce_bucket_size": 50_000}, 2 * 50_000 + 2 * 10_000),  # larger than the model
        ({"stage": 3, "reduce_bucket_size": None}, 2 * 5e8 + 2 * 10_000),  # DeepSpeed's default
    ],
    ids=str,
)
def test_zeros_buckets_hold_the_gradients_that_are_averaged_together(config, expected):
    config = {"reduce_bucket_size": SIZE} | config
    if config["reduce_bucket_size"] is None:
        del config["reduce_bucket_size"]
    assert with_zero(NO_PEAK, COUNTS, config, "sgd", 4).other == expected


def test_state_on_a_disk_is_not_on_the_gpu():
    nvme, cpu = ({"stage": 3, "offload_optimizer": {"device": name}} for name in ("nvme", "cpu"))
    parked, swapped = (with_zero(NO_PEAK, COUNTS, config, "adam", 1) for config in (cpu, nvme))
    assert (swapped.total, swapped.host) == (parked.total, 0)
