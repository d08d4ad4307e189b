"""Fused layers: found by watching, equal to the original, undone when they are not."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import transformers
from fuse_modules import (
    MEMBERS,
    QKV,
    TOLERANCE,
    Encoder,
    FeedForward,
    Siblings,
    difference,
    frozen,
    hf,
    on,
    reasons,
    runner,
    slots,
    types,
    unfused_state,
    weight_bytes,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from shapeserve.models.fuse import (
    FusionReport,
    fuse,
    fuse_verified,
    linear_gelu,
    unfuse,
)


class TestEncoders:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("kind", list(QKV))
    def test_projections_are_one_product_with_the_same_answers(
        self, kind: str, attention: str
    ) -> None:
        module = Encoder(hf(kind, attention))
        expected = {shape: runner(module, *shape)()[0] for shape in [(3, 10), (1, 1), (2, 33)]}
        report = fuse_verified(module, runner(module), TOLERANCE)
        assert report.undone is None
        assert report.error is not None
        assert report.error <= TOLERANCE
        for layer in range(2):
            names = tuple(QKV[kind].format(layer, member) for member in MEMBERS[kind])
            assert names in report.projections
        for shape, answer in expected.items():
            assert difference(runner(module, *shape)()[0], answer) <= TOLERANCE

    @pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "electra"])
    def test_the_gelu_joins_the_layer_before_it(self, kind: str) -> None:
        module = Encoder(hf(kind))
        expected = runner(module)()[0]
        calls: list[torch.Size] = []

        def gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            calls.append(weight.shape)
            return linear_gelu(x, weight, bias)

        report = fuse_verified(module, runner(module), TOLERANCE, gelu=gelu)
        assert len(report.gelus) == 2
        assert len(report.projections) == 2
        assert report.skipped == ()
        calls.clear()
        assert difference(runner(module)()[0], expected) <= TOLERANCE
        assert calls == [torch.Size([48, 32])] * 2

    def test_names_in_the_report_are_those_of_the_module(self) -> None:
        module = Encoder(hf("bert"))
        report = fuse(module, runner(module), gelu=linear_gelu)
        layer = "model.encoder.layer.1"
        assert report.projections[1] == tuple(
            f"{layer}.attention.self.{name}" for name in ("query", "key", "value")
        )
        assert report.gelus[1] == (
            f"{layer}.intermediate.dense",
            f"{layer}.intermediate.intermediate_act_fn",
        )

    def test_gate_and_up_of_a_decoder_are_siblings_too(self) -> None:
        module = Encoder(hf("qwen3"))
        report = fuse_verified(module, runner(module), TOLERANCE)
        assert ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj") in report.projections

    def test_a_gelu_of_a_part_of_the_product_is_left_alone(self) -> None:
        module = Encoder(hf("modernbert"))
        before = types(module)
        report = fuse_verified(module, runner(module), TOLERANCE, gelu=linear_gelu)
        assert not report.active
        assert report.error is None
        assert reasons(report) == ["its input is not the output of a linear layer"] * 2
        assert types(module) == before

    def test_layers_that_a_model_uses_again_are_left_alone(self) -> None:
        module = Encoder(hf("albert"))
        report = fuse_verified(module, runner(module), TOLERANCE)
        assert not report.active
        assert len(report.skipped) == 1  # once, not once a round
        assert "query is called 2 times" in reasons(report)[0]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision(self, dtype: torch.dtype) -> None:
        module = Encoder(hf("bert")).to(dtype)
        report = fuse_verified(module, runner(module), 1e-2, gelu=linear_gelu)
        assert report.active
        assert len(report.gelus) == 2

    def test_two_runs_give_the_same_bits(self) -> None:
        module = Encoder(hf("bert"))
        fuse(module, runner(module), gelu=linear_gelu)
        assert torch.equal(runner(module)()[0], runner(module)()[0])
        again = Encoder(hf("bert"))
        again.load_state_dict(unfused_state(module))
        fuse(again, runner(again), gelu=linear_gelu)
        assert torch.equal(runner(module)()[0], runner(again)()[0])


class TestProducts:
    @pytest.mark.parametrize("bias", [True, False])
    def test_one_product_for_three_layers(self, bias: bool) -> None:
        module = frozen(Siblings(bias))
        trial = on(module)
        expected = trial()
        report = fuse(module, trial)
        assert report.projections == (("q", "k", "v"),)
        with torch.profiler.profile() as profile:
            got = trial()
        linears = [event for event in profile.events() if event.name == "aten::linear"]
        assert len(linears) == 2  # joint, out
        torch.testing.assert_close(got, expected)

    def test_groups_end_where_the_input_changes(self) -> None:
        class Cross(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

            def forward(self, x: Tensor, y: Tensor) -> Tensor:
                return self.q(x) + self.k(y) * self.v(y)

        module = frozen(Cross())
        x, y = torch.randn(2, 3, 8)
        report = fuse_verified(module, lambda: module(x, y), TOLERANCE)
        assert report.projections == (("k", "v"),)
        assert report.skipped == ()

    def test_equal_tensors_are_not_the_same_tensor(self) -> None:
        class Copies(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                parts = [layer(x.clone()) for layer in (self.q, self.k, self.v)]
                out: Tensor = self.out(torch.cat(parts, -1))
                return out

        module = frozen(Copies())
        assert fuse(module, on(module)) == FusionReport()

    def test_a_layer_between_two_others_ends_the_group(self) -> None:
        class Between(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                q = self.q(x)
                v = self.v(q)
                return torch.cat([q, v, self.k(x)], -1)

        module = frozen(Between())
        assert fuse(module, on(module)).projections == ()

    def test_an_input_written_in_place_is_another_input(self) -> None:
        class InPlace(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                x = x * 1
                q = self.q(x)
                x += 1
                return torch.cat([q, self.k(x)], -1)

        module = frozen(InPlace())
        report = fuse(module, on(module))
        assert report.projections == ()
        assert reasons(report) == ["the input is written in place between the calls"]

    def test_a_wrong_product_under_inference_mode_is_undone(self) -> None:
        # Inference tensors do not say that they were written in place: the answers do.
        class InPlace(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                x = x * 1
                q = self.q(x)
                x += 1
                return torch.cat([q, self.k(x)], -1)

        module = frozen(InPlace())
        x = torch.randn(2, 8)
        with torch.inference_mode():
            expected = module(x)
            report = fuse_verified(module, lambda: module(x), TOLERANCE)
            assert report.projections == (("q", "k"),)
            assert report.undone is not None
            assert torch.equal(module(x), expected)

    def test_weights_stay_normal_tensors_under_inference_mode(self) -> None:
        module = frozen(nn.Sequential(Siblings(), FeedForward()))
        trial = on(module)
        with torch.inference_mode():
            assert fuse_verified(module, trial, TOLERANCE, gelu=linear_gelu).active
        tensors = [*module.parameters(), *module.buffers()]
        assert not any(tensor.is_inference() for tensor in tensors)
        with torch.inference_mode():
            unfuse(module)
        assert not any(parameter.is_inference() for parameter in module.parameters())

    def test_a_shared_layer_called_twice_is_left_alone(self) -> None:
        class Twice(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.q(x) + self.q(x) + self.k(x).sum()
                return out

        module = frozen(Twice())
        report = fuse(module, on(module))
        assert report.projections == ()
        assert [skipped.layers for skipped in report.skipped] == [("q", "k")]
        assert reasons(report) == ["q is called 2 times"]

    def test_keyword_inputs_are_seen(self) -> None:
        class Keyword(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                return torch.cat([self.q(input=x), self.k(input=x)], -1)

        module = frozen(Keyword())
        assert fuse_verified(module, on(module), TOLERANCE).projections == (("q", "k"),)


def _hook(m: Siblings) -> None:
    m.k.register_forward_hook(lambda *_: None)


def _pre_hook(m: Siblings) -> None:
    m.q.register_forward_pre_hook(lambda *_: None)


def _own_forward(m: Siblings) -> None:
    m.v.forward = m.v.forward


def _subclass(m: Siblings) -> None:
    m.k = type("Own", (nn.Linear,), {})(8, 4)


def _parametrized(m: Siblings) -> None:
    nn.utils.parametrize.register_parametrization(m.k, "weight", nn.Identity())


def _no_bias(m: Siblings) -> None:
    m.k = nn.Linear(8, 4, bias=False)


def _tied(m: Siblings) -> None:
    m.k = nn.Linear(8, 8)
    m.k.weight = m.q.weight
    m.out = nn.Linear(22, 8)


class TestRefusals:
    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (_hook, "k has a hook"),
            (_pre_hook, "q has a hook"),
            (_own_forward, "v has a forward of its own"),
            (_subclass, "k is a Own, not a plain nn.Linear"),
            (_parametrized, "k is a ParametrizedLinear, not a plain nn.Linear"),
            (_no_bias, "they differ in width, dtype, device or bias"),
            (_tied, "q has a weight that another module holds too"),
        ],
    )
    def test_one_odd_layer_keeps_its_group_apart(
        self, spoil: Callable[[Siblings], None], reason: str
    ) -> None:
        module = Siblings()
        spoil(module)
        frozen(module)
        before = types(module)
        report = fuse(module, on(module))
        assert report.projections == ()
        assert reasons(report) == [reason]
        assert report.skipped[0].layers == ("q", "k", "v")
        assert types(module) == before

    def test_layers_of_different_dtypes(self) -> None:
        class Autocast(Siblings):  # so that one input suits both
            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", torch.bfloat16):
                    return torch.cat([self.q(x), self.k(x)], -1)

        module = frozen(Autocast())
        module.q.to(torch.bfloat16)
        report = fuse(module, on(module))
        assert reasons(report) == ["they differ in width, dtype, device or bias"]

    def test_trainable_layers_are_left_alone(self) -> None:
        module = Siblings()
        report = fuse(module, on(module))
        assert reasons(report) == ["q is trainable; freeze it with requires_grad_(False)"]

    def test_quantised_weights_in_a_plain_linear_are_left_alone(self) -> None:
        class Quantised(nn.Parameter):
            pass

        module = frozen(Siblings())
        module.k.weight.__class__ = Quantised
        report = fuse(module, on(module))
        assert reasons(report) == ["k has a weight of type Quantised (torch.float32)"]

    def test_weights_made_under_inference_mode_are_left_alone(self) -> None:
        with torch.inference_mode():
            module = frozen(Siblings())
            report = fuse(module, on(module))
        assert reasons(report) == ["q has a weight made under inference_mode"]

    @pytest.mark.parametrize("name", ["masked_tokens", "masked_conv"])
    def test_models_without_anything_to_fuse(self, name: str) -> None:
        module = frozen(getattr(tiny, name)())
        inputs = {
            "masked_tokens": (torch.ones(2, 5, dtype=torch.int64),) * 2,
            "masked_conv": (torch.ones(2, 3, 4, 4), torch.ones(2, 4, 4)),
        }[name]
        report = fuse_verified(module, lambda: module(*inputs), TOLERANCE, gelu=linear_gelu)
        assert report == FusionReport()
        assert not report.active

    def test_a_fused_module_is_not_fused_again(self) -> None:
        module = frozen(Siblings())
        fuse(module, on(module))
        report = fuse(module, on(module))
        assert reasons(report) == ["q is a Leader, not a plain nn.Linear"]

    def test_switched_off(self) -> None:
        module = frozen(nn.Sequential(Siblings(), FeedForward()))
        assert fuse(module, on(module), projections=False) == FusionReport()


class TestGelu:
    @pytest.mark.parametrize(
        "act", [nn.GELU(), transformers.activations.ACT2FN["gelu"]], ids=["torch", "transformers"]
    )
    def test_exact_gelus_of_both_libraries(self, act: nn.Module) -> None:
        module = frozen(FeedForward(act))
        kind = type(act)
        report = fuse_verified(module, on(module), TOLERANCE, gelu=linear_gelu)
        assert report.gelus == (("up", "act"),)
        with torch.profiler.profile() as profile:
            on(module)()
        assert [event.name for event in profile.events()].count("aten::gelu") == 1
        unfuse(module)
        assert type(module.act) is kind

    @pytest.mark.parametrize(
        "act",
        [nn.GELU(approximate="tanh"), type("GELUActivation", (nn.ReLU,), {})()],
        ids=["tanh", "only the name"],
    )
    def test_what_only_looks_like_one_is_left_alone(self, act: nn.Module) -> None:
        module = frozen(FeedForward(act))
        report = fuse(module, on(module), gelu=linear_gelu)
        assert reasons(report) == ["act is not the exact (erf) GELU"]
        assert report.skipped[0].layers == ("up", "act")

    @pytest.mark.parametrize("act", ["gelu_new", "quick_gelu", "gelu_pytorch_tanh", "silu"])
    def test_other_activations_of_transformers_are_no_candidates(self, act: str) -> None:
        module = frozen(FeedForward(transformers.activations.ACT2FN[act]))
        assert fuse(module, on(module), gelu=linear_gelu) == FusionReport()

    @pytest.mark.parametrize(
        "use",
        [
            lambda h, g: h * g,
            lambda h, g: torch.cat([h, g], -1)[..., :16],
            lambda h, g: g + h.view(h.shape)[0],
            lambda h, g: torch.zeros_like(g).index_copy_(0, torch.arange(2), h) + g,
        ],
        ids=["product", "cat", "view", "write"],
    )
    def test_an_output_that_is_used_elsewhere_too_is_left_alone(
        self, use: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        class Gated(FeedForward):
            def forward(self, x: Tensor) -> Tensor:
                h = self.up(x)
                out: Tensor = self.down(use(h, self.act(h)))
                return out

        module = frozen(Gated())
        report = fuse(module, on(module), gelu=linear_gelu)
        assert report.gelus == ()
        assert reasons(report) == ["the output of up is used elsewhere too"]

    def test_an_output_that_is_returned_is_left_alone(self) -> None:
        class Telling(FeedForward):
            def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
                h = self.up(x)
                return {"out": self.down(self.act(h)), "hidden": (h,)}

        module = frozen(Telling())
        report = fuse(module, on(module), gelu=linear_gelu)
        assert reasons(report) == ["the output of up is used elsewhere too"]

    def test_asking_for_the_shape_is_no_use(self) -> None:
        class Asking(FeedForward):
            def forward(self, x: Tensor) -> Tensor:
                h = self.up(x)
                assert h.shape[-1] == h.size(-1) == 16
                assert h.dtype == x.dtype
                assert h.dim() == 3
                out: Tensor = self.down(self.act(h))
                return out

        module = frozen(Asking())
        assert fuse(module, on(module), gelu=linear_gelu).gelus == (("up", "act"),)

    def test_a_gelu_shared_by_two_layers_serves_both(self) -> None:
        first, second = FeedForward(), FeedForward()
        second.act = first.act
        module = frozen(nn.Sequential(first, second))
        report = fuse_verified(module, on(module), TOLERANCE, gelu=linear_gelu)
        assert report.gelus == (("0.up", "0.act"), ("1.up", "0.act"))
        assert report.undone is None

    def test_a_gelu_that_also_gets_something_else_is_left_alone(self) -> None:
        class Also(FeedForward):
            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.act(super().forward(x) * 2)
                return out

        module = frozen(Also())
        report = fuse(module, on(module), gelu=linear_gelu)
        assert reasons(report) == ["its input is not the output of a linear layer"]

    def test_a_layer_is_joined_rather_than_given_a_gelu(self) -> None:
        class GeGlu(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate, self.up, self.act = nn.Linear(8, 16), nn.Linear(8, 16), nn.GELU()

            def forward(self, x: Tensor) -> Tensor:
                out: Tensor = self.act(self.gate(x)) * self.up(x)
                return out

        module = frozen(GeGlu())
        report = fuse_verified(module, on(module), TOLERANCE, gelu=linear_gelu)
        assert report.projections == (("gate", "up"),)
        assert reasons(report) == ["gate shares a product with other layers"]
        unfuse(module)
        alone = fuse(module, on(module), projections=False, gelu=linear_gelu)
        assert alone.gelus == (("gate", "act"),)

    def test_hooks_on_the_gelu_keep_it(self) -> None:
        module = frozen(FeedForward())
        module.act.register_forward_hook(lambda *_: None)
        report = fuse(module, on(module), gelu=linear_gelu)
        assert reasons(report) == ["act has a hook"]

    def test_a_layer_without_bias_is_left_alone(self) -> None:
        module = FeedForward()
        module.up = nn.Linear(8, 16, bias=False)
        frozen(module)
        report = fuse(module, on(module), gelu=linear_gelu)
        assert reasons(report) == ["up has no bias"]

    def test_a_spent_gelu_refuses_what_its_layer_did_not_make(self) -> None:
        module = frozen(FeedForward())
        fuse(module, on(module), gelu=linear_gelu)
        with pytest.raises(RuntimeError, match="one forward at a time"):
            module.act(torch.randn(2, 16))
        hidden = module.up(torch.randn(2, 8))
        with pytest.raises(RuntimeError, match="one forward at a time"):
            module.act(hidden.clone())
        with pytest.raises(RuntimeError, match="one forward at a time"):
            module.act(hidden)  # the offer is gone: each is taken once
        on(module)()  # and the next forward is right again


class TestMemory:
    def test_weights_are_in_memory_once(self) -> None:
        module = Encoder(hf("bert"))
        before = weight_bytes(module)
        originals = [
            weakref.ref(p.untyped_storage()) for n, p in module.named_parameters() if "query" in n
        ]
        fuse(module, runner(module), gelu=linear_gelu)
        gc.collect()
        assert weight_bytes(module) == before
        assert [ref() for ref in originals] == [None] * len(originals)
        unfuse(module)
        assert weight_bytes(module) == before

    def test_the_joint_weight_is_what_the_parameters_show(self) -> None:
        module = frozen(Siblings())
        parameters = dict(module.named_parameters())
        keys = list(module.state_dict())
        fuse(module, on(module))
        assert dict(module.named_parameters()).keys() == parameters.keys()
        assert all(p is parameters[n] for n, p in module.named_parameters())
        assert list(module.state_dict()) == keys
        # Loading other weights reaches the product.
        other = frozen(Siblings())
        module.load_state_dict(other.state_dict())
        x = torch.randn(2, 8)
        torch.testing.assert_close(module(x), other(x))

    def test_nothing_is_held_between_forwards(self) -> None:
        module = Encoder(hf("bert"))
        fuse(module, runner(module), gelu=linear_gelu)
        assert len(slots(module)) == 2 * (2 + 1) + 2
        assert [slot.offer for slot in slots(module)] == [None] * len(slots(module))
        hidden: list[weakref.ref[Tensor]] = []
        handle = module.model.encoder.layer[0].register_forward_pre_hook(
            lambda _, args: hidden.append(weakref.ref(args[0]))
        )
        runner(module)()
        handle.remove()
        assert [slot.offer for slot in slots(module)] == [None] * len(slots(module))
        assert [ref() for ref in hidden] == [None]

    def test_the_observation_is_dropped(self) -> None:
        module = frozen(Siblings())
        seen: list[weakref.ref[Tensor]] = []

        def trial() -> object:
            x = torch.randn(2, 8)
            seen.append(weakref.ref(x))
            return module(x)

        fuse(module, trial)
        gc.collect()
        assert seen[0]() is None
        assert not module.q._forward_hooks


class TestPaths:
    """What happens where a forward differs from the trial."""

    def fused(self) -> Siblings:
        module = Siblings()
        frozen(module)
        fuse(module, on(module))
        return module

    def test_a_follower_computes_what_the_leader_did_not(self) -> None:
        module = self.fused()
        plain = copy.deepcopy(module)
        unfuse(plain)
        x, y = torch.randn(2, 3, 8)
        torch.testing.assert_close(module.k(x), plain.k(x))  # no leader
        module.q(x)
        torch.testing.assert_close(module.k(y), plain.k(y))  # another input
        torch.testing.assert_close(module.k(x), plain.k(x))  # the slice is gone
        module.q(x)
        torch.testing.assert_close(module.k(x), plain.k(x))
        torch.testing.assert_close(module.k(x), plain.k(x))  # a second time
        torch.testing.assert_close(module.v(x), plain.v(x))

    def test_a_forward_that_ends_in_an_error_leaves_no_wrong_slice(self) -> None:
        module = self.fused()
        x = torch.randn(2, 8)
        expected = module(x)
        handle = module.k.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            module(x + 1)
        handle.remove()
        assert torch.equal(module(x), expected)

    def test_copies_are_independent(self) -> None:
        module = self.fused()
        x = torch.randn(2, 8)
        expected = module(x)
        other = copy.deepcopy(module)
        for parameter in module.parameters():
            parameter.zero_()
        assert not module(x).any()
        assert torch.equal(other(x), expected)


class TestVerified:
    def test_a_wrong_fusion_is_undone_with_the_reason(self) -> None:
        module = Encoder(hf("bert"))
        expected, before = runner(module)()[0], types(module)
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        parameters = dict(module.named_parameters())

        def wrong(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return F.gelu(F.linear(x, weight, bias), approximate="tanh") * 1.01

        report = fuse_verified(module, runner(module), TOLERANCE, gelu=wrong)
        assert not report.active
        assert len(report.gelus) == 2  # what was tried
        assert report.error is not None
        assert report.error > TOLERANCE
        assert report.undone is not None
        assert "tolerance 1e-05" in report.undone
        assert types(module) == before
        assert torch.equal(runner(module)()[0], expected)
        assert {n: id(p) for n, p in module.named_parameters()} == {
            n: id(p) for n, p in parameters.items()
        }
        assert all(torch.equal(tensor, state[n]) for n, tensor in module.state_dict().items())
        assert not [n for n, _ in module.named_buffers() if "joint" in n]
        assert slots(module) == []

    def test_what_raises_is_undone_with_the_reason(self) -> None:
        module = Encoder(hf("bert"))
        expected, before = runner(module)()[0], types(module)

        def broken(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            raise NotImplementedError("no kernel for this device")

        report = fuse_verified(module, runner(module), TOLERANCE, gelu=broken)
        assert report.undone == "NotImplementedError: no kernel for this device"
        assert types(module) == before
        assert torch.equal(runner(module)()[0], expected)

    def test_a_view_that_a_slice_cannot_give_is_undone(self) -> None:
        class Flat(Siblings):
            def forward(self, x: Tensor) -> Tensor:
                return self.q(x).view(-1) + self.k(x).sum()

        module = frozen(Flat())
        report = fuse_verified(module, on(module), TOLERANCE)
        assert report.undone is not None
        assert "view" in report.undone
        on(module)()

    def test_answers_that_are_not_finite_are_not_trusted(self) -> None:
        module = Siblings()
        module.out.weight.data[0] = float("nan")
        frozen(module)
        report = fuse_verified(module, on(module), TOLERANCE)
        assert report.error == float("inf")
        assert report.undone is not None

    def test_a_trial_without_tensors_proves_nothing(self) -> None:
        module = frozen(Siblings())
        report = fuse_verified(module, lambda: (on(module)(), None)[1], TOLERANCE)
        assert report.undone == "the trial returned no tensors to compare"

    def test_a_trial_may_return_the_same_buffer_every_time(self) -> None:
        module = frozen(FeedForward())
        buffer, trial = torch.empty(2, 5, 8), on(module)
        report = fuse_verified(
            module, lambda: buffer.copy_(trial()), TOLERANCE, gelu=lambda x, w, b: x.sum() * w[:, 0]
        )
        assert report.undone is not None

    @pytest.mark.parametrize(
        "odd",
        [lambda out: (out, out), lambda out: out[:1], lambda out: out.double(), lambda _: None],
        ids=["count", "shape", "dtype", "nothing"],
    )
    def test_answers_of_another_kind_are_undone(self, odd: Callable[[Tensor], object]) -> None:
        module = frozen(Siblings())
        trial, calls = on(module), itertools.count()

        def trial_that_changes() -> object:
            out = torch.ones_like(trial())
            return odd(out) if next(calls) == 2 else out

        report = fuse_verified(module, trial_that_changes, TOLERANCE)
        assert report.error == float("inf")
        assert report.undone is not None

    def test_integers_must_be_equal(self) -> None:
        module = frozen(Siblings())
        x = torch.randn(2, 5, 8)
        assert fuse_verified(module, lambda: module(x).argmax(-1), TOLERANCE).error == 0.0
        unfuse(module)
        calls = itertools.count()
        report = fuse_verified(module, lambda: (module(x), next(calls) + x[0].long()), TOLERANCE)
        assert report.undone is not None

    def test_a_model_that_raises_untouched_raises(self) -> None:
        module = frozen(Siblings())
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            fuse_verified(module, lambda: module(torch.randn(2, 3)), TOLERANCE)
        assert not module.q._forward_hooks

    def test_a_fuse_that_fails_half_way_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        module = Encoder(hf("bert"))
        before = types(module)
        real, left = torch.cat, [3]

        def cat(*args: Any, **kwargs: Any) -> Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("out of memory")
            return real(*args, **kwargs)

        trial = runner(module)
        expected = trial()[0]
        monkeypatch.setattr("shapeserve.models.fuse.layers.torch.cat", cat)
        with pytest.raises(torch.OutOfMemoryError):
            fuse(module, trial)
        assert types(module) == before
        monkeypatch.undo()
        assert torch.equal(trial()[0], expected)

    def test_undo_gives_the_original_back(self) -> None:
        module = Encoder(hf("bert"))
        expected, before = runner(module)()[0], types(module)
        fuse(module, runner(module), gelu=linear_gelu)
        assert unfuse(module) == 2 * (3 + 2)
        assert types(module) == before
        assert torch.equal(runner(module)()[0], expected)
        assert unfuse(module) == 0
        storages = [p.untyped_storage().data_ptr() for p in module.parameters()]
        assert len(set(storages)) == len(storages)
