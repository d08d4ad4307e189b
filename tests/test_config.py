"""A wrong config is refused at load, naming place, value, bound and remedy."""

import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from shapeserve.config import (
    AxisPolicy,
    HttpConfig,
    Limits,
    ModelConfig,
    RareShape,
    ServeConfig,
    json_schema,
    model_directory,
    parse_policy,
    policy_to_dict,
    predicted_waste,
)
from shapeserve.config.docs import render_docs
from shapeserve.errors import ConfigError

MODULE: dict[str, Any] = {
    "import": "pkg.mod:factory",
    "inputs": {
        "image": {"dtype": "float32", "dims": ["batch", 3, "height", "width"]},
    },
    "outputs": {"scores": {"dtype": "float32", "dims": ["batch", 10]}},
}


def model(**keys: Any) -> ModelConfig:
    return ServeConfig.from_dict({"models": [{"path": "/models/m", **keys}]}).models[0]


def module(**keys: Any) -> ModelConfig:
    return ServeConfig.from_dict({"models": [{**copy.deepcopy(MODULE), **keys}]}).models[0]


def refusal(data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.from_dict(data)
    return str(caught.value)


def model_refusal(**keys: Any) -> str:
    return refusal({"models": [{"path": "/models/m", **keys}]})


def write(directory: Path, text: str) -> Path:
    file = directory / "service.yaml"
    file.write_text(dedent(text))
    return file


def yaml_refusal(directory: Path, text: str) -> str:
    file = write(directory, text)
    with pytest.raises(ConfigError) as caught:
        ServeConfig.from_yaml(file)
    return str(caught.value).replace(str(file), "service.yaml")


# Reading


def test_the_documented_shape_is_read(tmp_path: Path) -> None:
    config = ServeConfig.from_yaml(
        write(
            tmp_path,
            """\
            models:
            - name: all-MiniLM-L6-v2
              path: /models/minilm
              dtype: float32
              layout: auto
              policy:
                seq:   {exponential: {min: 8, max: 256, ratio: 1.3, align: 8}}
                batch: {explicit: [1, 2, 4, 8, 16, 32]}
              rare_shapes: {seq: {over_max: fallback, max_padding_waste: 0.6, guard_min: 64}}
              limits: {max_length: 256, hard_limit: 512, max_rows: 2048, max_batch_tokens: 8192,
                       max_queue_rows: 4096, max_queue_tokens: 1000000}
              compile: {tier: auto, freeze: auto}
            serve: {host: 127.0.0.1, port: 8000, replicas: 1, max_body_bytes: 16777216,
                    proxy: fast, drain_s: 10}
            """,
        )
    )
    (served,) = config.models
    assert served.policy["batch"].explicit == (1, 2, 4, 8, 16, 32)
    assert served.policy["seq"].ends == ((8, 256),)
    assert served.rare_shapes["seq"] == RareShape()
    assert served.limits == Limits(max_length=256, hard_limit=512)
    assert config.serve == HttpConfig()


def test_what_is_left_out_has_the_documented_default() -> None:
    served = model()
    assert served.policy == {}
    assert (served.limits.max_rows, served.limits.max_batch_tokens) == (2048, 8192)
    assert (served.limits.max_queue_rows, served.limits.max_queue_tokens) == (4096, 1_000_000)
    assert (served.compile.tier, served.compile.freeze, served.compile.strict) == (
        "auto",
        "auto",
        False,
    )
    assert served.batching.batch_wait_timeout_s == 0
    assert served.trust_remote_code is False


@pytest.mark.parametrize("config", [model(name="m", aliases=["n"]), module(threads=2)])
def test_plain_data_and_pickle_bring_the_same_config_back(config: ModelConfig) -> None:
    whole = ServeConfig(models=(config,))
    assert ServeConfig.from_dict(whole.to_dict()) == whole
    assert pickle.loads(pickle.dumps(whole)) == whole


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        model().dtype = "float16"  # type: ignore[misc]


def test_an_unquoted_on_or_off_is_a_word_and_not_a_boolean(tmp_path: Path) -> None:
    text = "models: [{path: m, compile: {freeze: %s}}]"
    for word in ("on", "off"):
        config = ServeConfig.from_yaml(write(tmp_path, text % word))
        assert config.models[0].compile.freeze == word


def test_a_relative_model_path_is_taken_from_the_config_file(tmp_path: Path) -> None:
    file = write(tmp_path, "models: [{path: m}, {path: /abs}, {path: 'package:pkg'}]")
    paths = [served.path for served in ServeConfig.from_yaml(file).models]
    assert paths == [str(tmp_path / "m"), "/abs", "package:pkg"]


def test_merged_and_anchored_keys_may_be_overridden(tmp_path: Path) -> None:
    config = ServeConfig.from_yaml(
        write(
            tmp_path,
            """\
            models:
            - &base {path: /a, dtype: bfloat16, limits: &limits {max_rows: 8}}
            - {<<: *base, path: /b, limits: *limits}
            """,
        )
    )
    assert [(m.path, m.dtype, m.limits.max_rows) for m in config.models] == [
        ("/a", "bfloat16", 8),
        ("/b", "bfloat16", 8),
    ]


# Places


def test_each_error_names_file_line_and_dotted_key(tmp_path: Path) -> None:
    text = """\
        models:
        - path: m
          policy:
            seq:
              explicit:
              - 16
              - 64
              - 32
          limits:
            max_rows: 0
        serve:
          prot: 80
        """
    first, second, third = yaml_refusal(tmp_path, text).splitlines()
    assert first == (
        "service.yaml:8: models[0].policy.seq.explicit[2]: size 32 comes after 64; "
        "sort them: [16, 32, 64]"
    )
    assert second.startswith("service.yaml:10: models[0].limits.max_rows: got 0, must be greater")
    assert third.startswith("service.yaml:12: serve.prot: unknown key 'prot'; did you mean 'port'?")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "models:\n- path: m\n  dtype: float32\n  dtype: float16\n",
            "4: the key 'dtype' is already",
        ),
        ("serve: {port: 1}\nmodels: []\nserve: {port: 2}\n", "3: the key 'serve' is already"),
        ("models:\n- path: m\n  policy: {seq: [}\n", "3: not valid YAML"),
        ("models:\n\t- path: m\n", "2: not valid YAML"),
        ("models: [*nowhere]\n", "1: not valid YAML"),
        ("models: []\n---\nmodels: []\n", "2: not valid YAML"),
        ("models: [{path: m, ? [a] : b}]\n", "1: "),
        ("models: !!python/object/apply:os.getcwd []\n", "1: not valid YAML"),
        ("", "1: got None"),
        ("- path: m\n", "1: got [{'path': 'm'}]"),
        ("models:\n- 7: m\n", "2: models[0][7]: unknown key 7"),
        ("serve:\n  port: 1\n", "1: models: this key is required; add it"),
        (
            "models:\n- path: m\n  policy:\n    seq: {linear: {min: 1, max: 9}}\n",
            "4: models[0].policy",
        ),
        ("models: &a [*a]\n", "1: models[0]"),
    ],
    ids=[
        "repeated key",
        "repeated section",
        "bracket",
        "tab",
        "alias",
        "two documents",
        "list as key",
        "python tag",
        "empty file",
        "list file",
        "number as key",
        "missing section",
        "missing key",
        "endless alias",
    ],
)
def test_a_malformed_file_is_refused_with_its_line(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert yaml_refusal(tmp_path, text).startswith(f"service.yaml:{expected}")


def test_an_error_below_a_merged_key_has_the_line_of_the_value_that_counts(tmp_path: Path) -> None:
    text = """\
        models:
        - &base
          path: /a
        - <<: *base
          path: ''
        """
    assert yaml_refusal(tmp_path, text).startswith("service.yaml:5: models[1].path: got ''")


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        ServeConfig.from_yaml(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read"):
        ServeConfig.from_yaml(tmp_path / "binary.yaml")


# Values


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            {"explicit": [16, 64, 32]},
            "explicit[2]: size 32 comes after 64; sort them: [16, 32, 64]",
        ),
        ({"explicit": [16, 16]}, "explicit[1]: size 16 is there twice; remove one"),
        ({"explicit": [0, 16]}, "explicit[0]: size 0 is below 1; remove it"),
        ({"explicit": []}, "explicit: no size is given; list at least one"),
        ({"explicit": [8.5]}, "explicit[0]: got 8.5, must be a whole number"),
        ({"explicit": [True]}, "explicit[0]: got True, must be a whole number"),
        ({"explicit": 8}, "explicit: got 8, must be a list; write it in brackets"),
        ({"linear": {"min": 64, "max": 8, "step": 8}}, "linear.min: min 64 is above max 8"),
        ({"linear": {"min": 8, "max": 64, "step": 0}}, "linear.step: got 0, must be greater"),
        (
            {"exponential": {"min": 8, "max": 64, "ratio": 1}},
            "exponential.ratio: ratio 1 does not grow; it must be above 1",
        ),
        (
            {"exponential": {"min": 8, "max": 64, "ratio": float("nan")}},
            "exponential.ratio: got nan, must be a finite number",
        ),
        (
            {"exponential": {"min": 12, "max": 64, "align": 8}},
            "exponential.min: min 12 is not a multiple of align 8; use min: 16",
        ),
        ({}, "none given; give exactly one of explicit, linear, exponential"),
        (
            {"explicit": [8], "linear": {"min": 8, "max": 8, "step": 1}},
            "explicit and linear given; give exactly one",
        ),
        ({"geometric": {}}, "geometric: unknown key 'geometric'; Known keys: explicit, exp"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_axis_policy_is_refused(sizes: dict[str, Any], expected: str) -> None:
    assert expected in model_refusal(policy={"seq": sizes})
    with pytest.raises(ConfigError) as caught:
        parse_policy({"seq": sizes})
    assert str(caught.value).startswith("seq")
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "sizes",
    [
        {"explicit": [16, 300]},
        {"linear": {"min": 16, "max": 300, "step": 16}},
        {"exponential": {"min": 16, "max": 300}},
    ],
    ids=["explicit", "linear", "exponential"],
)
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_length": 256}, "largest bucket seq=300 is above limits.max_length 256; end the"),
        ({"hard_limit": 256}, "largest bucket seq=300 is above limits.hard_limit 256; end the"),
        ({"max_length": 512}, "largest bucket seq=300 does not cover limits.max_length 512; end"),
    ],
    ids=["above max_length", "above hard_limit", "uncovering"],
)
def test_a_grid_that_misses_the_limits_is_refused(
    sizes: dict[str, Any], limits: dict[str, int], expected: str
) -> None:
    message = model_refusal(policy={"seq": sizes}, limits=limits)
    assert expected in message
    assert message.startswith(f"models[0].policy.seq.{next(iter(sizes))}")


def test_batch_sizes_are_not_bounded_by_the_length_limits() -> None:
    policy = {"batch": {"explicit": [1, 1024]}, "seq": {"explicit": [256]}}
    assert model(policy=policy, limits={"max_length": 256}).policy["batch"].ends == ((1, 1024),)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (
            {"max_length": 512, "hard_limit": 256},
            "limits.max_length: max_length 512 is above hard_limit 256",
        ),
        (
            {"hard_limit": 512, "max_queue_tokens": 256},
            "limits.max_queue_tokens: max_queue_tokens 256 would never admit a row of 512",
        ),
        ({"max_rows": "8"}, "limits.max_rows: got '8', must be a whole number; write it"),
    ],
    ids=["order", "queue", "type"],
)
def test_contradicting_limits_are_refused(limits: dict[str, Any], expected: str) -> None:
    assert expected in model_refusal(limits=limits)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"layout": "packed", "policy": {"seq": {"explicit": [8]}}},
            "models[0].policy.seq: policy.seq says nothing about packed rows",
        ),
        (
            {"layout": "padded", "policy": {"tokens": {"explicit": [8]}}},
            "models[0].policy.tokens: policy.tokens is for packed rows, but layout asks for padded",
        ),
        ({"dtype": "int8"}, "models[0].dtype: got 'int8', must be 'float32', 'bfloat16' or 'flo"),
        ({"polcy": {}}, "models[0].polcy: unknown key 'polcy'; did you mean 'policy'?"),
        ({"compile": {"eager_isles": []}}, "models[0].compile.eager_isles: unknown key"),
        ({"compile": {"strict": "yes"}}, "models[0].compile.strict: got 'yes', must be true or"),
        ({"rare_shapes": {"seq": {"max_padding_waste": 0}}}, "max_padding_waste: got 0, must be g"),
        (
            {"rare_shapes": {"seq": {"over_max": "drop"}}},
            "over_max: got 'drop', must be 'fallback'",
        ),
        ({"rare_shapes": {"batch": {}}}, "models[0].rare_shapes.batch: batch has no rare shapes"),
        ({"policy": {"se q": {"explicit": [1]}}}, "models[0].policy.se q: got 'se q', must match"),
        ({"policy": None}, "models[0].policy: got None, must be keys with values; write"),
        ({"batching": {"batch_wait_timeout_s": -1}}, "batch_wait_timeout_s: got -1, must be gre"),
        ({"inputs": {}}, "models[0].inputs: inputs belongs to import"),
        ({"import": "a:b"}, "models[0]: a model needs exactly one of path and import; both are"),
        ({"path": None}, "models[0]: a model needs exactly one of path and import; neither is"),
        ({"threads": 0}, "models[0].threads: got 0, must be greater than or equal to 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_model_key_is_refused(keys: dict[str, Any], expected: str) -> None:
    assert expected in model_refusal(**keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"import": "no_function"}, "models[0].import: got 'no_function', must match pattern"),
        ({"outputs": None}, "models[0].import: import needs inputs and outputs"),
        (
            {"policy": {"hight": {"explicit": [8]}}},
            "policy.hight: no input has the axis 'hight'; d",
        ),
        ({"rare_shapes": {"seq": {}}}, "rare_shapes.seq: no input has the axis 'seq'; Axes: batch"),
        (
            {"outputs": {"y": {"dtype": "float32", "dims": ["batch", "seq"]}}},
            "models[0].outputs.y.dims: no input has the axis 'seq'",
        ),
    ],
    ids=["import", "outputs", "policy axis", "rare axis", "output axis"],
)
def test_a_wrong_module_declaration_is_refused(keys: dict[str, Any], expected: str) -> None:
    assert expected in refusal({"models": [{**MODULE, **keys}]})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"dims": ["seq", "batch"]}, "inputs.x.dims: dims ['seq', 'batch'] must begin with batch"),
        ({"dims": ["batch", 0]}, "inputs.x.dims[1]: dim 0 is below 1"),
        ({"dims": ["batch", "se q"]}, "inputs.x.dims[1]: dim 'se q' is no axis name"),
        (
            {"dims": ["batch", 1.5]},
            "inputs.x.dims[1]: got 1.5, must be a whole number",
        ),
        ({"pad": 0.5}, "inputs.x.pad: pad 0.5 is not a whole number, but dtype is int64"),
        ({"dims": ["batch", 3], "make": "mask"}, "inputs.x.make: make: mask needs an axis bes"),
        ({"make": "mask"}, "models[0].inputs: every input is made by the layout"),
        ({"dtype": "float8"}, "inputs.x.dtype: got 'float8', must be 'float32'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_input_spec_is_refused(spec: dict[str, Any], expected: str) -> None:
    data = {
        "import": "pkg.mod:factory",
        "inputs": {"x": {"dtype": "int64", "dims": ["batch", "seq"], **spec}},
        "outputs": {"y": {"dtype": "float32", "dims": ["batch", 1]}},
    }
    assert expected in refusal({"models": [data]})


def test_models_of_a_service_agree_on_threads() -> None:
    two, none, four = ({"path": "/m", "threads": n} for n in (2, None, 4))
    assert len(ServeConfig.from_dict({"models": [none, two, none, two]}).models) == 4
    message = refusal({"models": [none, two, four, none]})
    assert message.startswith("models[2].threads: threads 4 differs from 2 above")


def test_two_models_cannot_share_a_name_or_alias() -> None:
    one = {"path": "/a", "name": "x"}
    message = refusal({"models": [one, {"path": "/b", "name": "y", "aliases": ["x"]}]})
    assert message == "models[1]: the name 'x' is taken by models[0]; choose another"


@pytest.mark.parametrize("port", [0, 65536, True])
def test_a_port_must_be_one(port: int) -> None:
    assert "serve.port: got" in refusal({"models": [{"path": "/a"}], "serve": {"port": port}})


@pytest.mark.parametrize(
    ("serve", "message"),
    [
        ({"grpc_port": 0}, "serve.grpc_port: got 0"),
        ({"port": 9, "grpc_port": 9}, "grpc_port 9 is the HTTP port; choose another"),
        (
            {"proxy": "default", "host": "192.0.2.2", "grpc_port": 9},
            "gRPC cannot listen on 192.0.2.2 alone; use proxy fast, or host 127.0.0.1 or 0.0.0.0",
        ),
    ],
)
def test_a_grpc_port_that_cannot_be_served_is_refused(serve: Any, message: str) -> None:
    assert message in refusal({"models": [{"path": "/a"}], "serve": serve})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", "0.0.0.0", "::"])
def test_rays_python_proxy_can_serve_grpc_to_this_machine_or_to_all(host: str) -> None:
    serve = {"proxy": "default", "host": host, "grpc_port": 9}
    assert ServeConfig.from_dict({"models": [{"path": "/a"}], "serve": serve}).serve.grpc_port == 9


def test_no_models_at_all_is_refused() -> None:
    assert refusal({"models": []}).startswith("models: no model is given")


# Model directories


def test_a_model_directory_gets_the_default_config(tmp_path: Path) -> None:
    config = ServeConfig.for_model_dir(tmp_path, name="m")
    assert (config.models[0].path, config.models[0].name) == (str(tmp_path), "m")
    with pytest.raises(ConfigError, match="is not a directory; give the directory"):
        ServeConfig.for_model_dir(tmp_path / "absent")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that must not be imported to find the model inside."""
    root = tmp_path / "site" / "weights_pkg"
    root.mkdir(parents=True)
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(root.parent))
    return root


@pytest.mark.parametrize("where", [".", "model"])
def test_a_model_is_found_in_a_package_without_importing_it(package: Path, where: str) -> None:
    (package / where).mkdir(exist_ok=True)
    (package / where / "config.json").write_text("{}")
    assert model_directory("package:weights_pkg") == (package / where).resolve()


def test_a_package_without_exactly_one_model_is_refused(package: Path) -> None:
    with pytest.raises(ConfigError, match="it holds 0"):
        model_directory("package:weights_pkg")
    for name in ("a", "b"):
        (package / name).mkdir()
        (package / name / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="it holds 2"):
        model_directory("package:weights_pkg")


@pytest.mark.parametrize("name", ["no_such_package_here", "weights_pkg.model", "json.decoder", ""])
def test_a_package_that_is_not_there_is_refused(package: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"not installed|top-level package"):
        model_directory(f"package:{name}")


# Documentation


def fields(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, definition in [("ServeConfig", schema), *schema["$defs"].items()]:
        for key, value in definition.get("properties", {}).items():
            yield f"{name}.{key}", value


def test_every_field_says_effect_unit_and_default() -> None:
    for name, field in fields(json_schema()):
        assert "(unit: " in field.get("description", ""), name
        assert "default: " in field["description"] or "required)" in field["description"], name


def test_the_page_of_the_configuration_is_current_and_has_every_key() -> None:
    page = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    assert page == render_docs(), "run: python -m shapeserve.config > docs/configuration.md"
    for name, _ in fields(json_schema()):
        assert f"\n| `{name.split('.')[1]}` |" in page


def test_the_schema_knows_keys_by_their_yaml_names_and_refuses_others() -> None:
    schema = json_schema()
    names = {name for name, _ in fields(schema)}
    assert {"ModelConfig.import", "ModelConfig.rare_shapes", "HttpConfig.grpc_port"} <= names
    assert all(d["additionalProperties"] is False for d in schema["$defs"].values())


def test_python_code_may_build_the_models_directly() -> None:
    built = ModelConfig(import_="a:b", inputs=module().inputs, outputs=module().outputs)
    assert built.import_ == "a:b"
    assert isinstance(AxisPolicy(explicit=(8, 16)), BaseModel)


# Several axes together, and limits for each


SHAPES = {"height,width": {"shapes": [[480, 640], [640, 480]]}}
IMAGE_WASTE = {"height": 0.1, "width": 0.2}


def test_what_the_tuner_predicted_survives_and_is_told_by_axis() -> None:
    data = {
        "seq": {"explicit": [8], "predicted_waste": 0.08},
        "height,width": SHAPES["height,width"] | {"predicted_waste": IMAGE_WASTE},
        "frames": {"explicit": [4]},
    }
    policy = parse_policy(data)
    assert predicted_waste(policy) == {"seq": 0.08, **IMAGE_WASTE}
    assert policy_to_dict(policy) == data


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"seq": {"explicit": [8], "predicted_waste": 1}}, "seq.predicted_waste: got 1"),
        (
            {"batch": {"explicit": [8], "predicted_waste": 0.1}},
            "batch.predicted_waste: predicted_waste is of the sizes of a row, batch is none",
        ),
        (
            {"height,width": SHAPES["height,width"] | {"predicted_waste": 0.1}},
            "given for height,width; give one share for each of height, width",
        ),
        (
            {"height,width": SHAPES["height,width"] | {"predicted_waste": {"height": 0.1}}},
            "given for height; give one share",
        ),
    ],
    ids=["all", "batch", "one of two", "half"],
)
def test_a_prediction_of_something_else_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_policy(policy)


def test_shapes_survive_yaml_plain_data_and_the_policy_alone(tmp_path: Path) -> None:
    config = module(policy=SHAPES, limits={"max_length": {"height": 640, "width": 640}})
    assert config.policy["height,width"].shapes == ((480, 640), (640, 480))
    data = ServeConfig(models=(config,)).to_dict()
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(data))
    assert ServeConfig.from_yaml(file).models[0] == config
    assert parse_policy(data["models"][0]["policy"]) == config.policy


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"height,width": {"explicit": [8]}}, "height,width: the axes height,width together are"),
        ({"height,width": {"shapes": []}}, "height,width.shapes: no shape is given; list at"),
        ({"height,width": {"shapes": [[8]]}}, "shapes[0]: shape [8] has 1 sizes; height,width ne"),
        ({"height,width": {"shapes": [[8, 0]]}}, "shapes[0][1]: got 0, must be greater"),
        ({"height,width": {"shapes": [8, 8]}}, "shapes[0]: got 8, must be a list"),
        ({"height,width": {"shapes": [[8, 8], [8, 8]]}}, "shapes[1]: shape [8, 8] is there twice"),
        ({"height": {"shapes": [[8]]}}, "height.shapes: shapes are sizes of several row axes"),
        ({"batch,width": {"shapes": [[8, 8]]}}, "shapes: shapes are sizes of several row axes"),
        ({**SHAPES, "width": {"explicit": [8]}}, "width: the sizes of width are given by 'height,"),
        ({"width,width": {"shapes": [[8, 8]]}}, "width,width: the sizes of width are given by"),
        ({"height,": {"shapes": [[8, 8]]}}, "got 'height,', must match pattern"),
        ({"height,with": {"shapes": [[8, 8]]}}, "no input has the axis 'with'; did you mean"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_shapes_are_refused(policy: dict[str, Any], expected: str) -> None:
    assert expected in refusal({"models": [{**MODULE, "policy": policy}]})


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_length": {"height": 0}}, "max_length.height: got 0, must be greater than or eq"),
        ({"max_length": {"hight": 8}}, "limits: rows have no axis 'hight'; did you mean 'height'"),
        ({"hard_limit": {"batch": 8}}, "limits: rows have no axis 'batch'"),
        (
            {"max_length": {"height": 640}, "hard_limit": {"height": 512}},
            "limits.max_length.height: max_length 640 is above hard_limit 512",
        ),
        (
            {"max_length": 640, "hard_limit": {"width": 512}},
            "limits.max_length: max_length 640 is above hard_limit 512",
        ),
        (
            {"min_length": {"height": 9}, "max_length": 8},
            "min_length.height: min_length 9 is above the largest bucket of 8; lower it",
        ),
        ({"min_length": 0}, "limits.min_length: got 0, must be greater than or equal to 1"),
        (
            {"hard_limit": {"height": 512}, "max_queue_tokens": 256},
            "max_queue_tokens 256 would never admit a row of 512",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_limits_of_an_axis_are_refused(limits: dict[str, Any], expected: str) -> None:
    assert expected in refusal({"models": [{**MODULE, "limits": limits}]})


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"hard_limit": {"height": 512}}, "largest bucket height=640 is above limits.hard_limit"),
        ({"max_length": {"width": 512}}, "largest bucket width=640 is above limits.max_length 51"),
        ({"max_length": {"width": 700}}, "largest bucket width=640 does not cover limits.max_len"),
        ({"min_length": {"width": 500}}, "smallest bucket width=480 is below limits.min_length 5"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_shapes_beyond_the_limits_of_an_axis_are_refused(
    limits: dict[str, Any], expected: str
) -> None:
    message = refusal({"models": [{**MODULE, "policy": SHAPES, "limits": limits}]})
    assert expected in message
    assert message.startswith("models[0].policy.height,width")


def test_a_text_model_has_no_shortest_row() -> None:
    assert "limits.min_length: min_length belongs to import" in model_refusal(
        limits={"min_length": 4}
    )


def test_pieces_of_a_split_row_cannot_be_held_to_a_shortest_row() -> None:
    keys = {"limits": {"min_length": 4}, "rare_shapes": {"width": {"over_max": "split"}}}
    assert "rare_shapes.width.over_max: the last piece" in refusal({"models": [{**MODULE, **keys}]})


@pytest.mark.parametrize(
    "dim", ["height/0", "height/x", "/4", "height/4/2", "batch/2", "width/1.5"]
)
def test_an_output_rate_that_is_none_is_refused(dim: str) -> None:
    outputs = {"y": {"dtype": "float32", "dims": ["batch", dim]}}
    message = refusal({"models": [{**MODULE, "outputs": outputs}]})
    assert f"outputs.y.dims[1]: dim {dim!r} is no axis at a lower rate; write it as" in message


def test_an_output_rate_of_an_axis_that_is_not_there_is_refused() -> None:
    outputs = {"y": {"dtype": "float32", "dims": ["batch", "frames/4"]}}
    assert "no input has the axis 'frames/4'" in refusal(
        {"models": [{**MODULE, "outputs": outputs}]}
    )
