"""`bench admit`: what it reports is measured on real pools."""

from mstar.bench.admit import measure_admit


def test_l17_l07_steady_steps_have_no_collective_and_every_miss_is_one_install():
    cost = measure_admit(num_registered=6, num_slots=4, num_steps=20)
    assert cost.steady_agreements == 0
    assert cost.steady_us > 0 and cost.miss_us > 0
