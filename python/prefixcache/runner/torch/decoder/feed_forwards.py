"""What computes on each token of a layer alone: an MLP, experts, or both.

Letters of shapes: as in `decoder_model.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prefixcache.config.model_config import ModelConfig
from prefixcache.models.decoder.shapes import DenseAndExpertsShape, DenseShape, ExpertsShape
from prefixcache.runner.torch.decoder.builder import Builder, norm_of
from prefixcache.runner.torch.typed import distinct


class DenseFeedForward:
    """An MLP, gated or not, without what `out` makes of it."""

    def __init__(self, shape: DenseShape, builder: Builder) -> None:
        self._gate = builder.gate(shape.activation)
        self._gate_up = builder.linear(shape.gate_up)
        self.out = builder.linear(shape.down)

    def __call__(self, x_TE: Tensor) -> Tensor:
        """What `out` takes: [T, F]."""
        return self._gate(self._gate_up(x_TE))


class ExpertsFeedForward:
    """A mixture of experts, one expert after the other; see `ExpertsShape`."""

    def __init__(self, shape: ExpertsShape, builder: Builder) -> None:
        self._gate = builder.gate(shape.activation)
        self._experts = shape.experts
        bias = shape.selection_bias
        self._selection_bias_N = None if bias is None else builder.vector(bias)
        self._scales_N = None if shape.scales is None else builder.vector(shape.scales)
        self._router = builder.linear(shape.router)
        self._gate_up = builder.linear(shape.gate_up)
        self._down = builder.linear(shape.down)
        self._shared = DenseFeedForward(shape.shared, builder) if shape.shared else None
        self._shared_weight = builder.linear(shape.shared_weight) if shape.shared_weight else None

    def __call__(self, x_TE: Tensor, chosen_by_TE: Tensor | None = None) -> Tensor:
        """The weighted sum of what each token's experts make of it, [T, E] in float32.

        It is taken in the order of their scores, what the shared expert makes last. The router
        reads `chosen_by_TE` where it is given.
        """
        routed_TE = x_TE if chosen_by_TE is None else chosen_by_TE
        weights_TK, experts_TK = self._route(self._router.wide(routed_TE).float())
        count, top_k = self._experts.count, self._experts.top_k
        made_TKE = x_TE.new_empty(*experts_TK.shape, x_TE.shape[1], dtype=torch.float32)
        for expert in distinct(experts_TK):
            token, rank = (experts_TK == expert).nonzero(as_tuple=True)
            gated = self._gate(self._gate_up.block(expert, count, x_TE[token]))
            made_TKE[token, rank] = self._down.block(expert, count, gated).float()
        sum_TE = torch.zeros_like(made_TKE[:, 0])
        for rank in range(top_k):
            sum_TE += made_TKE[:, rank] * weights_TK[:, rank, None]
        if self._shared is not None:
            made_TE = self._shared.out(self._shared(x_TE)).float()
            if self._shared_weight is not None:
                made_TE *= self._shared_weight.wide(x_TE).float().sigmoid()
            sum_TE += made_TE
        return sum_TE

    def _route(self, logits_TN: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of each token's experts, and their numbers."""
        experts = self._experts
        softmax = experts.scores == "softmax"
        scores_TN = torch.softmax(logits_TN, dim=-1) if softmax else logits_TN.sigmoid()
        bias_N = self._selection_bias_N
        compared_TN = scores_TN if bias_N is None else scores_TN + bias_N
        experts_TK = compared_TN.topk(experts.top_k, dim=-1).indices
        weights_TK = scores_TN.gather(1, experts_TK)
        if experts.renormalise:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True) + experts.added_to_sum
        weights_TK = weights_TK * experts.scale
        if self._scales_N is not None:
            weights_TK *= self._scales_N[experts_TK]
        return weights_TK, experts_TK

    @staticmethod
    def out(sum_TE: Tensor, residual_TE: Tensor | None = None) -> Tensor:
        """The sum, with the residual added, rounded once; in the type of the residual."""
        return sum_TE if residual_TE is None else (residual_TE.float() + sum_TE).to(residual_TE)


class DenseAndExperts:
    """An MLP and experts next to it; see `DenseAndExpertsShape`."""

    def __init__(self, config: ModelConfig, shape: DenseAndExpertsShape, builder: Builder) -> None:
        self._rms_norm = norm_of(config, builder.ops)
        self._dense = DenseFeedForward(shape.dense, builder)
        self._experts = ExpertsFeedForward(shape.experts, builder)
        self._dense_norms_E = builder.norm(shape.dense_norm), builder.norm(shape.dense_out_norm)
        self._router_norm_E = builder.norm(shape.router_norm)
        self._experts_norms_E = (
            builder.norm(shape.experts_norm),
            builder.norm(shape.experts_out_norm),
        )

    def __call__(self, x_TE: Tensor) -> Tensor:
        """The sum of what both make of the stream, [T, E]."""
        before_E, after_E = self._dense_norms_E
        dense_TE = self._dense.out(self._dense(self._rms_norm(x_TE, before_E)))
        dense_TE = self._rms_norm(dense_TE, after_E)
        before_E, after_E = self._experts_norms_E
        chosen_by_TE = self._rms_norm(x_TE, self._router_norm_E)
        made_TE = self._experts(self._rms_norm(x_TE, before_E), chosen_by_TE).to(x_TE)
        return dense_TE + self._rms_norm(made_TE, after_E)

    @staticmethod
    def out(sum_TE: Tensor, residual_TE: Tensor | None = None) -> Tensor:
        """The sum, with the residual added."""
        return sum_TE if residual_TE is None else residual_TE + sum_TE


def feed_forward_of(
    config: ModelConfig, shape: DenseShape | ExpertsShape | DenseAndExpertsShape, builder: Builder
) -> DenseFeedForward | ExpertsFeedForward | DenseAndExperts:
    """What computes on each token of a layer."""
    if isinstance(shape, DenseAndExpertsShape):
        return DenseAndExperts(config, shape, builder)
    if isinstance(shape, ExpertsShape):
        return ExpertsFeedForward(shape, builder)
    return DenseFeedForward(shape, builder)
