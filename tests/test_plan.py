import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from shapeserve.config import ModelConfig, ServeConfig
from shapeserve.errors import ConfigError
from shapeserve.expect import Waste
from shapeserve.metrics import Tier
from shapeserve.plan import plan
from shapeserve.traces import Shapes, read_lengths, read_shapes

EXAMPLES = Path(__file__).parent.parent / "deploy" / "examples"

SEQ = {"dtype": "float32", "dims": ["batch", "seq"]}
IMAGE = {"dtype": "float32", "dims": ["batch", 3, "height", "width"]}
SIZES = {"explicit": [8, 16, 64]}
BATCHES = {"explicit": [1, 2, 4]}


def model(**changes: Any) -> ModelConfig:
    """A model with one axis of 8, 16, 64 and a hard limit of 128; never imported."""
    data: dict[str, Any] = {
        "import": "nowhere:factory",
        "inputs": {"x": SEQ},
        "outputs": {"y": {"dtype": "float32", "dims": ["batch"]}},
        "policy": {"seq": SIZES, "batch": BATCHES},
        **changes,
    }
    return ServeConfig.from_dict({"models": [data]}).models[0]


def rare(**rules: Any) -> Mapping[str, Any]:
    return {"rare_shapes": {"seq": rules}}


def waste(real: int, padding: int) -> Waste:
    return Waste(real, {"seq": padding})


def waste_of(config: ModelConfig, lengths: Mapping[int, int]) -> Waste:
    expected = plan(config, "cpu", lengths).expected
    assert expected is not None
    return expected.waste


def test_the_grid_is_the_product_of_the_axes() -> None:
    planned = plan(model(), "cpu")
    assert [b.label for b in planned.grid.buckets][:4] == [
        "batch=1,seq=8",
        "batch=1,seq=16",
        "batch=1,seq=64",
        "batch=2,seq=8",
    ]
    assert len(planned.grid) == 9
    assert planned.expected is None


def test_the_grid_is_the_one_that_the_engine_serves() -> None:
    import tiny  # imports torch, which nothing else here needs

    from shapeserve import Engine

    data = {"models": [tiny.module_config("masked_tokens", compile={"tier": "eager"})]}
    config = ServeConfig.from_dict(data).models[0]
    with Engine(config).start() as engine:
        assert plan(config, "cpu").grid.version == engine.grid.version


@pytest.mark.parametrize(
    ("device", "wanted", "tier"),
    [
        ("cpu", "auto", Tier.COMPILED),
        ("cuda", "auto", Tier.GRAPH),
        ("cuda", "compiled", Tier.COMPILED),
        ("cpu", "eager", Tier.EAGER),
    ],
)
def test_the_tier_follows_the_device_unless_the_config_says_otherwise(
    device: Any, wanted: str, tier: Tier
) -> None:
    planned = plan(model(compile={"tier": wanted}), device)
    assert planned.tier is tier
    assert ("no compile" in planned.programs) == (tier is Tier.EAGER)


def test_graphs_on_the_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"graph needs"):
        plan(model(compile={"tier": "graph"}), "cpu")


def test_row_padding_is_exact() -> None:
    # 3 of 5 -> 8: 9 more; 2 of 16 -> 16: none; 1 of 40 -> 64: 24 more.
    assert waste_of(model(), {5: 3, 16: 2, 40: 1}) == waste(15 + 32 + 40, 9 + 24)


def test_a_fallback_counts_its_own_area() -> None:
    # Beyond the grid, rounded up to a multiple of 8.
    assert waste_of(model(), {100: 1}) == waste(100, 4)


def test_a_row_that_the_guard_sends_to_the_fallback_counts_its_own_area() -> None:
    config = model(**rare(max_padding_waste=0.5, guard_min=16))
    expected = plan(config, "cpu", {20: 2}).expected
    assert expected is not None
    assert expected.outcomes == {"fallback (padding_waste)": 2}
    assert expected.waste == waste(40, 8)
    assert sum(expected.by_size.values()) == 0


def test_truncated_rows_count_what_is_left_of_them() -> None:
    assert waste_of(model(**rare(over_max="truncate")), {100: 1}) == waste(64, 0)


def test_split_rows_count_every_piece() -> None:
    # 100 = 64 + 36, the latter in 64; modules have no special tokens.
    assert waste_of(model(**rare(over_max="split")), {100: 1}) == waste(100, 28)


def test_rejected_rows_execute_nothing() -> None:
    expected = plan(model(), "cpu", {129: 5, 8: 1}).expected
    assert expected is not None
    assert expected.outcomes == {"reject": 5, "bucket": 1}
    assert expected.waste == waste(8, 0)


def test_the_usual_policies_are_compared_on_the_same_rows() -> None:
    expected = plan(model(), "cpu", {5: 1, 33: 1, 100: 1}).expected
    assert expected is not None
    # Buckets 8 and 64; beyond the grid the fallback, as for the policy itself.
    assert expected.compared["pow2"] == waste(138, 3 + 31 + 4)
    assert expected.compared["pad_to_max"] == waste(138, 59 + 31 + 4)


@given(st.dictionaries(st.integers(1, 140), st.integers(1, 50), min_size=1))
def test_every_row_has_one_outcome_and_no_bucket_beats_its_own_length(
    lengths: dict[int, int],
) -> None:
    expected = plan(model(), "cpu", lengths).expected
    assert expected is not None
    assert sum(expected.outcomes.values()) == expected.rows == sum(lengths.values())
    assert sum(expected.by_size.values()) == expected.outcomes.get("bucket", 0)
    assert expected.waste.real == sum(n * rows for n, rows in lengths.items() if n <= 128)
    assert 0 <= expected.waste.ratio < 1
    assert expected.waste.padding <= expected.compared["pad_to_max"].padding


def test_lengths_of_one_axis_do_not_suit_a_model_of_two() -> None:
    config = model(
        inputs={"x": IMAGE},
        policy={"height": SIZES, "width": SIZES, "batch": BATCHES},
    )
    assert plan(config, "cpu").grid.row_axes == ("height", "width")
    with pytest.raises(ConfigError, match=r"sizes along one axis, .* has the axes height, width"):
        plan(config, "cpu", {8: 1})


def test_the_reason_says_which_axes_the_config_decides() -> None:
    assert "seq, batch from the policy" in plan(model(), "cpu").why.replace(
        "batch, seq", "seq, batch"
    )
    only_seq = plan(model(policy={"seq": SIZES}), "cpu").why
    assert "seq from the policy" in only_seq
    assert "batch by default for cpu" in only_seq
    by_default = plan(model(policy={}, limits={"max_length": 64}), "cpu").why
    assert "share one dynamic-shape program" in by_default


def test_json_says_that_batch_padding_is_not_known() -> None:
    data = json.loads(json.dumps(plan(model(), "cpu", {5: 3}).to_dict()))
    assert data["expected"]["waste"]["configured"] == {"padding_seq": 0.375, "padding_batch": None}
    assert data["variants"] == {"compiled": 9}
    assert len(data["grid"]["buckets"]) == 9


def test_minilm_ends_its_grid_at_its_own_maximum(minilm_dir: Path, trace_dir: Path) -> None:
    config = ServeConfig.for_model_dir(minilm_dir).models[0]
    lengths = read_lengths(trace_dir / "enc_rag_mix.csv.gz")
    expected = plan(config, "cpu", lengths).expected
    assert expected is not None
    assert max(expected.by_size) == (256,)
    over = sum(rows for n, rows in lengths.items() if n > 256)
    assert expected.outcomes == {"bucket": expected.rows - over, "fallback (over_max)": over}
    assert expected.waste.ratio < expected.compared["pow2"].ratio
    assert expected.compared["pow2"].ratio < expected.compared["pad_to_max"].ratio
    assert math.isclose(expected.waste.ratio, 0.085, abs_tol=0.001)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("plan") / "m", max_length=256, positions=512)


def text_plan(directory: Path, device: Any, **keys: Any) -> Any:
    config = ServeConfig.from_dict({"models": [{"path": str(directory), **keys}]}).models[0]
    return plan(config, device, {4: 3, 300: 1})


def test_text_is_packed_on_cuda_unless_the_policy_speaks_of_padded_sizes(text_model: Path) -> None:
    packed = text_plan(text_model, "cuda")
    assert packed.grid.axes == ("tokens",)
    assert "1 compile" in packed.programs
    assert packed.expected.waste.padding == 0
    assert packed.expected.outcomes == {"bucket": 4}
    padded = text_plan(text_model, "cuda", policy={"seq": {"explicit": [64, 256]}})
    assert padded.grid.axes == text_plan(text_model, "cpu").grid.axes == ("batch", "seq")


def test_a_plan_predicts_the_memory_of_the_captures(text_model: Path) -> None:
    limits = {"max_batch_tokens": 4096}
    compiled = text_plan(text_model, "cuda", dtype="float16", limits=limits)
    assert compiled.graph_bytes == 4096 * 32 * 2 * 10
    eager = text_plan(
        text_model, "cuda", dtype="float16", limits=limits, compile={"tier": "eager_graph"}
    )
    assert eager.graph_bytes > compiled.graph_bytes
    assert "captured as it is" in eager.programs
    assert text_plan(text_model, "cpu").graph_bytes is None


def image_model(**changes: Any) -> ModelConfig:
    policy = {"height,width": {"shapes": [[4, 6], [6, 4], [8, 8]]}, "batch": BATCHES}
    return model(**{"inputs": {"x": IMAGE}, "policy": policy, **changes})


def test_padding_of_images_is_split_by_axis() -> None:
    shapes = Shapes(("width", "height"), {(5, 3): 2, (8, 8): 1, (16, 9): 1})
    expected = plan(image_model(), "cpu", shapes).expected
    assert expected is not None
    # 3 x 5 in 4 x 6: 3 columns of 1 and a line of 6, twice. 9 x 16 is beyond the grid: unpadded.
    assert expected.waste == Waste(30 + 64 + 144, {"height": 2 * 6, "width": 2 * 3})
    assert expected.by_size == {(4, 6): 2, (6, 4): 0, (8, 8): 1}
    assert expected.outcomes == {"bucket": 3, "fallback (over_max)": 1}
    assert expected.compared["pad_to_max"].by_axis["height"] == 2 * 5 * 8
    data = json.loads(json.dumps(expected.to_dict()))
    assert data["rows_by_size"] == {"4x6": 2, "6x4": 0, "8x8": 1}
    assert set(data["waste"]["pow2"]) == {"padding_height", "padding_width"}


def test_shapes_of_other_axes_are_refused() -> None:
    shapes = Shapes(("height", "depth"), {(4, 4): 1})
    with pytest.raises(ConfigError, match=r"along height, depth, .* give a trace t_s,height,width"):
        plan(image_model(), "cpu", shapes)


def test_the_queue_must_admit_the_largest_image() -> None:
    limits = {"hard_limit": {"height": 64, "width": 32}, "max_queue_tokens": 2047}
    with pytest.raises(ConfigError, match=r"height=64 x width=32 .* of 2048 elements; use"):
        plan(image_model(limits=limits), "cpu")


@pytest.mark.parametrize(
    ("example", "trace", "most"),
    [
        ("image_encoder", "coco_val2017", {"height": 0.022, "width": 0.018}),
        ("audio_encoder", "librispeech_devclean", {"frames": 0.0715}),
    ],
)
def test_the_examples_waste_what_the_documentation_says(
    trace_dir: Path, example: str, trace: str, most: dict[str, float]
) -> None:
    config = ServeConfig.from_yaml(EXAMPLES / f"{example}.yaml").models[0]
    expected = plan(config, "cpu", read_shapes(trace_dir / f"{trace}.csv.gz")).expected
    assert expected is not None
    assert all(expected.waste.share(axis) <= share for axis, share in most.items())
    assert expected.outcomes["bucket"] == expected.rows
    assert expected.waste.ratio < expected.compared["pow2"].ratio / 3
