"""The timing model, rule by rule: micro-kernels whose cycles are computed here by hand.

A SIMD has a turn every 4 cycles, so every issue is at a multiple of 4 from the first.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fly.emulator.timing.compute_unit import REASONS
from fly.emulator.timing.figures import ARCHS, FIGURES, Parameters, disputed
from fly.errors import ArgumentError
from tests.emulator.timed import issues, replayed, session

both = pytest.mark.parametrize("arch", ARCHS)
ADD = "v_add_f32 v{0}, v{0}, v40"
MFMA16 = "v_mfma_f32_16x16x16_bf16 v[8:11], v[4:5], v[6:7], {}"
MFMA32 = "v_mfma_f32_32x32x16_bf16 v[{0}:{1}], v[4:7], v[8:11], {2}"
LANE = "v_and_b32 v1, 63, v0\nv_lshlrev_b32 v2, {}, v1\ns_nop 4"  # v2 = lane << …
SIMD0 = 5  # waves of a workgroup whose first and last share SIMD 0


def adds(count: int, first: int = 10) -> str:
    return "\n".join(ADD.format(first + i) for i in range(count))


# ---- vector instructions ----


@both
def test_a_wave_issues_one_vector_instruction_a_turn(arch):
    assert issues(adds(4), arch=arch) == [0, 4, 8, 12, 16]


def test_a_dependent_vector_instruction_waits_for_the_result():
    chain = "\n".join([ADD.format(10)] * 3)
    assert issues(chain, arch="gfx950") == [0, 8, 16, 20]
    assert issues(chain, arch="gfx942") == [0, 4, 8, 12]
    assert issues(chain, arch="gfx942", valu_latency=8) == [0, 8, 16, 20]


@pytest.mark.parametrize("arch, port", [("gfx942", 16), ("gfx950", 8)])
def test_a_transcendental_holds_the_port_longer(arch, port):
    exp = "v_exp_f32 v10, v20"
    assert issues(f"{exp}\n{ADD.format(11)}", arch=arch) == [0, port, port + 4]
    # the scalar unit of the same wave is not held
    assert issues(f"{exp}\ns_add_u32 s8, s8, 1\n{ADD.format(11)}", arch=arch) == [0, 4, port, port + 4]


def test_32_bit_integer_products_take_a_quarter_of_the_rate():
    assert issues(f"v_mul_lo_u32 v10, v20, v21\n{ADD.format(11)}") == [0, 16, 20]


# ---- matrix instructions ----


@pytest.mark.parametrize(
    "arch, name, registers, cycles",
    [
        ("gfx942", "v_mfma_f32_32x32x8_bf16", 2, 32),
        ("gfx942", "v_mfma_f32_16x16x16_bf16", 2, 16),
        ("gfx950", "v_mfma_f32_32x32x16_bf16", 4, 32),
        ("gfx950", "v_mfma_f32_16x16x32_bf16", 4, 16),
        ("gfx942", "v_mfma_f32_32x32x2_f32", 1, 64),
    ],
)
def test_the_matrix_pipe_is_busy_for_the_passes(arch, name, registers, cycles):
    a, b = (f"v[{n}:{n + registers - 1}]" if registers > 1 else f"v{n}" for n in (4, 8))
    body = "\n".join(f"{name} v[{c}:{c + 15 if '32x32' in name else c + 3}], {a}, {b}, 0" for c in (16, 32, 48))
    assert issues(body, arch=arch) == [0, cycles, 2 * cycles, 2 * cycles + 4]
    assert replayed(body, arch=arch).matrix == [3 * cycles, 0, 0, 0]


def test_vector_instructions_issue_in_the_shadow_of_a_matrix_instruction():
    """Four turns of a 16-cycle MFMA: itself and three others; the fourth delays the next MFMA."""
    mfma = MFMA16.format(0)
    other = mfma.replace("v[8:11]", "v[12:15]")
    assert issues(f"{mfma}\n{adds(3, 20)}\n{other}", arch="gfx942") == [0, 4, 8, 12, 16, 20]
    assert issues(f"{mfma}\n{adds(4, 20)}\n{other}", arch="gfx942") == [0, 4, 8, 12, 16, 20, 24]
    # an exponential holds the port from 4 to 20, an MFMA needs it for its first turn
    assert issues(f"{mfma}\nv_exp_f32 v20, v21\n{other}", arch="gfx942") == [0, 4, 20, 24]


def test_a_sum_is_forwarded_but_not_to_other_operands():
    first = MFMA32.format(16, 31, 0)
    accumulate = MFMA32.format(16, 31, "v[16:31]")
    assert issues(f"{first}\n{accumulate}") == [0, 32, 36]
    # as an operand of another product: 8 passes and 4 more turns (12 wait states on gfx950) after the turn of issue
    read = "v_mfma_f32_32x32x16_bf16 v[32:47], v[16:19], v[8:11], 0"
    assert issues(f"{first}\n{read}") == [0, 4 * 12, 4 * 12 + 4]
    assert issues(f"{first}\nv_mov_b32 v50, v16") == [0, 4 * 12, 4 * 12 + 4]


@both
def test_packed_f32_arithmetic_waits_until_the_matrix_pipe_has_drained(arch):
    """Measured: an MFMA of 16 cycles, and 8 more until v_pk_mul_f32 starts; each further one takes 4."""
    packed = "v_pk_mul_f32 v[20:21], v[22:23], v[24:25]\nv_pk_mul_f32 v[26:27], v[22:23], v[24:25]"
    body = f"{MFMA16.format(0)}\n{packed}\n{MFMA16.format(0).replace('v[8:11]', 'v[12:15]')}"
    assert issues(body, arch=arch) == [0, 24, 28, 32, 36]
    assert issues(body, arch=arch, packed_drain=-1000) == [0, 4, 8, 16, 20]


# ---- several waves ----


def test_two_waves_of_a_simd_share_the_vector_port():
    result = replayed(adds(3), waves=SIMD0)
    assert [e.cycle for e in result.events if e.wave == 0] == [0, 4, 8, 12]
    assert [e.cycle for e in result.events if e.wave == 4] == [12, 16, 20, 24]
    assert [e.cycle for e in result.events if e.wave == 1] == [1, 5, 9, 13]  # SIMD 1 has its turns a cycle later
    assert result.simd_of == [0, 1, 2, 3, 0]


def test_a_turn_takes_one_instruction_of_each_class_from_different_waves():
    """Wave 0 issues its vector instruction and wave 4 its scalar one in the same turn, then the other way round."""
    scalar, vector = "s_add_u32 s8, s8, 1", ADD.format(10)
    body = f"v_cmp_gt_u32 vcc, 64, v0\ns_nop 4\ns_cbranch_vccz other\n{vector}\n{scalar}\ns_endpgm\nother:\n"
    result = replayed(f"{body}{scalar}\n{vector}", waves=SIMD0)
    first, second = ([e.cycle for e in result.events if e.wave == w][3:] for w in (0, 4))
    # wave 4 took its branch, so it is some turns behind
    assert first[1] == first[0] + 4 and second[1] == second[0] + 4
    shared = replayed(f"{scalar}\n{vector}", waves=SIMD0)
    assert [e.cycle for e in shared.events if e.wave == 0] == [0, 4, 8]
    # in turn 4 the vector instruction of wave 0 and the scalar one of wave 4
    assert [e.cycle for e in shared.events if e.wave == 4] == [4, 8, 12]


def test_a_matrix_instruction_of_one_wave_hides_vector_instructions_of_another():
    body = f"v_cmp_gt_u32 vcc, 64, v0\ns_nop 4\ns_cbranch_vccz other\n{MFMA16.format(0)}\n{MFMA16.format(0)}\n"
    body = f"{body}s_endpgm\nother:\n{adds(3, 20)}"
    result = replayed(body, waves=SIMD0, arch="gfx942", branch_taken=8)
    first, second = ([e.cycle for e in result.events if e.wave == w][3:] for w in (0, 4))
    assert first[1] - first[0] == 16
    assert [cycle - first[0] for cycle in second[:3]] == [4, 8, 12]


def test_priority_beats_age():
    body = "v_cmp_gt_u32 vcc, 64, v0\ns_nop 4\ns_cbranch_vccnz low\ns_setprio 3\nlow:\ns_barrier\n" + adds(3)
    result = replayed(body, waves=SIMD0)
    first, second = ([e.cycle for e in result.events if e.wave == w][-4:-1] for w in (0, 4))
    assert second[0] < first[0] and first == [second[2] + 4 * (i + 1) for i in range(3)]
    result = replayed(body.replace("s_setprio 3", "s_nop 0"), waves=SIMD0)
    first, second = ([e.cycle for e in result.events if e.wave == w][-4:-1] for w in (0, 4))
    assert second == [first[2] + 4 * (i + 1) for i in range(3)]


def test_a_barrier_opens_when_the_last_wave_arrives():
    """Wave 4 comes 20 turns late; both go on 8 cycles after its arrival, on the one SIMD in turn."""
    body = "v_cmp_gt_u32 vcc, 64, v0\ns_nop 4\ns_cbranch_vccnz early\ns_nop 15\ns_nop 3\nearly:\ns_barrier\ns_nop 0"
    result = replayed(body, waves=SIMD0)
    arrivals = {e.wave: e.cycle for e in result.events if e.index == 5}
    following = {e.wave: e.cycle for e in result.events if e.index == 6}
    assert arrivals[4] > arrivals[0] + 60
    assert following[0] == following[4] == arrivals[4] + 8
    waited = result.stalls[0][REASONS.index("barrier")]
    assert waited == arrivals[4] + 8 - (arrivals[0] + 4)


# ---- control ----


def test_nops_take_their_turns():
    assert issues(f"s_nop 0\ns_nop 4\n{ADD.format(10)}") == [0, 4, 24, 28]
    assert issues(f"s_sleep 1\n{ADD.format(10)}") == [0, 68, 72]


def test_branches():
    taken = "s_branch away\ns_nop 0\naway:\ns_nop 0"
    assert issues(taken) == [0, 16, 20]
    assert issues(taken, branch_taken=32) == [0, 32, 36]
    assert issues("s_cmp_eq_u32 s0, s0\ns_cbranch_scc0 away\ns_nop 0\naway:\ns_nop 0") == [0, 4, 12, 16, 20]


def test_an_unaligned_stream_of_long_instructions_loses_a_turn_at_every_line_of_code():
    """8-byte instructions from byte 4 on: the fourth of them crosses byte 32."""
    long = "\n".join(f"v_add_f32_e64 v{10 + i}, v{20 + i}, v30" for i in range(6))
    assert issues(f"s_nop 0\n{long}", skip=1, straddle=4) == [0, 4, 8, 16, 20, 24, 28]
    assert issues(f"s_nop 0\n{long}", skip=1, straddle=0) == [0, 4, 8, 12, 16, 20, 24]
    assert issues(long, straddle=4) == [0, 4, 8, 12, 16, 20, 24]


def test_waits_are_told_apart():
    result = replayed(f"{LANE.format(2)}\nds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)\nv_mov_b32 v4, v3", lds=1024)
    waits = {reason: cycles for reason, cycles in zip(REASONS, result.stalls[0]) if cycles}
    # v2 depends on v1; the nop has four extra turns; the data comes 4 + 61 + 2 cycles behind the read, and the next
    # turn is 64 behind the one in which the wait could have issued
    assert waits == {"dependency": 4, "nop": 16, "lgkmcnt": 64}


# ---- LDS ----


@pytest.mark.parametrize(
    "arch, read, shift, wait",
    [
        # one turn to get there, 48 or 61 cycles, the data at 64 or 128 bytes a cycle, up to the next turn
        ("gfx942", "ds_read_b32 v3, v2", 2, 4 + 48 + 4),
        ("gfx942", "ds_read_b128 v[4:7], v2", 4, 4 + 48 + 16),
        ("gfx942", "ds_read_b32 v3, v2", 7, 4 + 48 + 64),  # all lanes in one bank
        ("gfx950", "ds_read_b32 v3, v2", 2, 68),  # 4 + 61 + 2 = 67
        ("gfx950", "ds_read_b128 v[4:7], v2", 4, 76),  # 4 + 61 + 8 = 73
    ],
)
def test_latency_of_lds(arch, read, shift, wait):
    body = f"{LANE.format(shift)}\n{read}\ns_waitcnt lgkmcnt(0)"
    assert issues(body, skip=3, arch=arch, lds=16384) == [0, wait, wait + 4]


def test_a_wait_counts_the_operations_that_may_stay_outstanding():
    reads = "\n".join(f"ds_read_b128 v[{n}:{n + 3}], v2" for n in (4, 8, 12))
    body = f"{LANE.format(4)}\n{reads}\ns_waitcnt lgkmcnt(%d)"
    # on gfx942 their data moves from 52 to 68, to 84 and to 100
    for outstanding, end in ((3, 12), (2, 68), (1, 84), (0, 100)):
        assert issues(body % outstanding, skip=3, arch="gfx942", lds=16384)[3] == end


def test_a_wave_has_fifteen_lds_operations_outstanding():
    reads = "\n".join(f"ds_read_b32 v{n}, v2" for n in range(4, 20))
    cycles = issues(f"{LANE.format(2)}\n{reads}", skip=3, arch="gfx942", lds=1024)
    # the first is done at 4 + 48 + 4; the sixteenth would have come at 60
    assert cycles[:15] == list(range(0, 60, 4)) and cycles[15] == 60
    slow = issues(f"{LANE.format(7)}\n{reads}", skip=3, arch="gfx942", lds=16384)
    assert slow[14] == 56 and slow[15] == 4 + 48 + 64


def test_pairs_of_simds_have_a_port_each_and_share_the_banks():
    """Waves 0 and 1 have one port: 16 cycles a read. Waves 0 and 2 have two, and 8 cycles in the banks are free for
    the other.
    """
    reads = "\n".join(f"ds_read_b128 v[{n}:{n + 3}], v2" for n in range(4, 68, 4))
    body = f"v_and_b32 v1, 63, v0\nv_lshlrev_b32 v2, 4, v1\n{reads}\ns_waitcnt lgkmcnt(0)"
    one, two, three = (replayed(body, waves=n, arch="gfx942", lds=1024).cycles for n in (1, 2, 3))
    assert 250 < two - one < 262 and two <= three < two + 16


def test_without_conflicts():
    body = f"{LANE.format(7)}\nds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)"
    assert issues(body, skip=3, arch="gfx942", lds=16384, conflicts=0)[1] == 4 + 48 + 4


@pytest.mark.parametrize("banks, cycles", [(16, 8), (32, 4), (64, 2)])
def test_banks_are_a_figure(banks, cycles):
    """Lanes are two dwords apart: in each phase half of the banks give two words. Writes have their own figure."""
    body = f"{LANE.format(3)}\nds_read_b32 v3, v2\ns_waitcnt lgkmcnt(0)"
    assert replayed(body, arch="gfx942", lds=1024, read_banks=banks).lds == cycles
    write = body.replace("ds_read_b32 v3, v2", "ds_write_b32 v2, v1")
    assert replayed(write, arch="gfx942", lds=1024, write_banks=banks).lds == cycles


def test_lds_operations_without_addresses():
    body = f"{LANE.format(2)}\nds_bpermute_b32 v3, v2, v1\ns_waitcnt lgkmcnt(0)"
    result = replayed(body, arch="gfx942")
    assert result.lds == 2


# ---- memory ----

POINTER = "s_load_dwordx2 s[4:5], s[0:1], 0x0\nv_and_b32 v1, 63, v0\nv_lshlrev_b32 v2, 4, v1\ns_waitcnt lgkmcnt(0)"


def test_loads_of_16_bytes_a_lane_pass_every_16_cycles():
    loads = "\n".join(
        f"global_load_dwordx4 v[{4 + 4 * i}:{7 + 4 * i}], v2, s[4:5] offset:{1024 * i}" for i in range(4)
    )
    body = f"{POINTER}\n{loads}\ns_waitcnt vmcnt(0)"
    cycles = issues(body, skip=4, array=4096, fill_rate=10**6)
    # the address unit starts on them at 4, 20, 36 and 52; L2 answers 300 later
    assert cycles[:4] == [0, 4, 8, 12] and cycles[4] == 52 + 300
    # 64 bytes a cycle from L2: 8 lines of 128 bytes each, the last of 32 lines 2·32 cycles behind the first
    assert issues(body, skip=4, array=4096)[4] == 4 + 300 + 2 * 31 + 2  # 368: the first of them arrives at 304


def test_atomics_pass_l2_at_their_rate():
    adds = "\n".join(f"global_atomic_add_f32 v2, v4, s[4:5] offset:{256 * i}" for i in range(4))
    body = f"v_mov_b32 v4, 0\n{POINTER}\n{adds}\ns_waitcnt vmcnt(0)"
    cycles = issues(body, skip=5, array=4096, atomic_rate=8)
    # lanes are 16 bytes apart: eight lines of 128 bytes each, 16 cycles a line, from the first one's arrival on
    assert cycles[4] == 4 + 300 + 4 * 8 * 16
    assert issues(body, skip=5, array=4096, atomic_rate=16)[4] == 4 + 300 + 4 * 8 * 8


def test_the_address_unit_takes_a_limited_number_of_instructions():
    loads = "\n".join("global_load_dwordx4 v[4:7], v2, s[4:5]" for _ in range(20))
    cycles = issues(f"{POINTER}\n{loads}", skip=4, array=1024, memory_queue=4)
    # it starts on them at 4, 20, 36, …: at 16 and at 20 one has left the queue, afterwards one in 16 cycles
    assert cycles[:7] == [0, 4, 8, 12, 16, 20, 36]
    assert cycles[5:-1] == list(range(20, 20 + 15 * 16, 16))


def test_where_lines_come_from():
    load = "global_load_dwordx4 v[4:7], v2, s[4:5]"
    body = f"{POINTER}\n{load}\ns_waitcnt vmcnt(0)\n{load}\ns_waitcnt vmcnt(0)"
    for cold, first, lines in ((0, 300, (8, 8, 0)), (1, 700, (8, 0, 8)), (4, 700, (8, 6, 2))):
        result = replayed(body, array=1024, cold=cold, fill_rate=10**6, memory_bandwidth=10**9)
        cycles = [e.cycle for e in result.events][4:]
        # the second load finds its lines in L1: 16 cycles of addresses and 120 more behind the turn
        assert cycles[1] - cycles[0] == 4 + first and cycles[3] - cycles[2] == 4 + 16 + 120
        assert tuple(result.lines.values()) == lines


def test_a_wave_waits_for_its_share_of_memory_bandwidth():
    load = "global_load_dwordx4 v[4:7], v2, s[4:5]"
    body = f"{POINTER}\n{load}\ns_waitcnt vmcnt(0)"
    fast, slow = (issues(body, skip=4, array=1024, cold=1, memory_bandwidth=b)[1] for b in (8000, 800))
    # 128 bytes of a 256th of 800 GB/s at the sustained clock take 72 cycles
    share = 800 / Parameters.of("gfx950").sustained_clock / 256
    assert 4 + 700 < fast < 4 + 700 + 80 and abs(slow - (4 + 700 + 7 * 128 / share)) < 12


def test_stores_are_acknowledged():
    body = f"{POINTER}\nglobal_store_dwordx4 v2, v[4:7], s[4:5]\ns_waitcnt vmcnt(0)"
    assert issues(body, skip=4, array=1024)[1] == 4 + 16 + 300


def test_loads_to_lds_write_its_banks():
    descriptor = "s_mov_b32 s6, 0x1000\ns_mov_b32 s7, 0x20000\ns_mov_b32 m0, 0"
    load = "buffer_load_dwordx4 v2, s[4:7], 0 offen lds"
    result = replayed(f"{POINTER}\n{descriptor}\n{load}\ns_waitcnt vmcnt(0)", array=1024, lds=1024)
    assert result.lds == 8  # 1024 bytes at 128 a cycle
    cycles = [e.cycle for e in result.events][7:]
    assert cycles[1] - cycles[0] == 4 + 300 + 2 * 7 + 2 + 8 - 4 + 4  # eight lines, two cycles each, then LDS; a turn


def test_scalar_loads():
    assert issues("s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)")[1] == 160


# ---- figures ----


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_source(name):
    for arch in ARCHS:
        figure = FIGURES[name][arch]
        assert len(figure.source) > 5
        assert all(len(source) > 5 and value != figure.value for value, source in figure.alternatives)


def test_figures_can_be_replaced():
    assert (
        Parameters.of("gfx950").transcendental == 8
        and Parameters.of("gfx950", transcendental=16).transcendental == 16
    )
    assert {"transcendental", "read_port", "valu_latency"} <= set(disputed("gfx950"))
    with pytest.raises(ArgumentError, match=r"no figures for 'sm_90a'; accepted: gfx942, gfx950"):
        Parameters.of("sm_90a")
    with pytest.raises(ArgumentError, match=r"no figure 'exp'; accepted: compute_units, dies, "):
        Parameters.of("gfx950", exp=16)


def test_the_same_launch_gives_the_same_cycles():
    body = f"{POINTER}\nglobal_load_dwordx4 v[4:7], v2, s[4:5]\ns_waitcnt vmcnt(0)\ns_barrier\n{adds(3)}"
    first, second = (session(body, waves=8, array=4096, cold=4) for _ in range(2))
    assert first.replay() == first.replay() == second.replay()
    other = replace(first.parameters, memory_latency=900)
    assert first.replay(other).cycles == first.replay().cycles + 200
