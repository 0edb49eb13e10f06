"""The shape of the decoder that a config describes."""

from __future__ import annotations

from collections.abc import Mapping

from prefixcache.config.families import FAMILIES
from prefixcache.config.model_config import DeltaConfig, ExpertsConfig, MambaConfig, ModelConfig
from prefixcache.models.decoder.shapes import (
    AttentionShape,
    ConvShape,
    DecoderShape,
    DenseAndExpertsShape,
    DenseShape,
    ExpertsShape,
    LayerShape,
    LinearShape,
    Makes,
    NormShape,
    OwnInputShape,
    OwnInputsShape,
    PairedHeads,
    Pieces,
    StateShape,
    VectorShape,
)
from prefixcache.models.rope import Rotation


def decoder_shape(config: ModelConfig) -> DecoderShape:
    """The shape of the model that the config describes."""
    name = "" if config.tie_word_embeddings else "lm_head"
    turns = [_rotations_of(config, layer) for layer in range(config.num_layers)]
    rotations = tuple(dict.fromkeys(rotation for both in turns for rotation in both))
    numbers = [tuple(map(rotations.index, both)) for both in turns]
    return DecoderShape(
        layers=tuple(_layer(config, layer, ropes) for layer, ropes in enumerate(numbers)),
        rotations=rotations,
        own_inputs=_own_inputs(config) if config.own_input_size else None,
        norm=NormShape(config.hidden_size, {f"model.{_names(config)['norm']}": 1}),
        head=LinearShape(config.hidden_size, {name: config.vocab_size}),
    )


def _layer(config: ModelConfig, layer: int, ropes: tuple[int, ...]) -> LayerShape:
    number, has_mlp = _number(config, layer), layer not in config.bare_layers
    prefix = mlp_prefix = f"model.layers.{number}"
    if FAMILIES[config.architecture].lone_parts:
        mlp_prefix = f"model.layers.{number + 1}"

    def norm(name: str, prefix: str = prefix) -> NormShape:
        return NormShape(config.hidden_size, {f"{prefix}.{name}": 1})

    # "post-attention" is another norm where there are four.
    sandwich, names = config.sandwich_norms, _names(config)
    feed_forward = _feed_forward(config, layer, mlp_prefix) if has_mlp else None
    reads_normed = config.input_norms and isinstance(feed_forward, DenseShape | ExpertsShape)
    mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return LayerShape(
        input_norm=norm(names["input_norm"]) if config.input_norms else None,
        mixer=_mixer(config, layer, prefix, ropes),
        mixer_out_norm=norm("post_attention_layernorm") if sandwich else None,
        mlp_norm=norm(names.get("mlp_norm", mlp_norm), mlp_prefix) if reads_normed else None,
        feed_forward=feed_forward,
        mlp_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
        own_input=_own_input(config, prefix) if config.own_input_size else None,
        scale=VectorShape(f"{prefix}.layer_scalar", 1) if config.layer_scales else None,
    )


def _number(config: ModelConfig, layer: int) -> int:
    """The layer's in a checkpoint, where MLPs may be layers too."""
    if not FAMILIES[config.architecture].lone_parts:
        return layer
    return layer + sum(before not in config.bare_layers for before in range(layer))


def _own_input(config: ModelConfig, prefix: str) -> OwnInputShape:
    hidden, size = config.hidden_size, config.own_input_size
    return OwnInputShape(
        gate=LinearShape(hidden, {f"{prefix}.per_layer_input_gate": size}),
        activation=config.activation,
        out=LinearShape(size, {f"{prefix}.per_layer_projection": hidden}),
        norm=NormShape(hidden, {f"{prefix}.post_per_layer_input_norm": 1}),
    )


def _own_inputs(config: ModelConfig) -> OwnInputsShape:
    hidden, size = config.hidden_size, config.own_input_size
    width = config.num_layers * size
    return OwnInputsShape(
        table=LinearShape(width, {"": config.own_input_vocab_size}),
        projection=LinearShape(hidden, {"model.per_layer_model_projection": width}),
        norm=NormShape(size, {"model.per_layer_projection_norm": 1}),
    )


def _mixer(
    config: ModelConfig, layer: int, prefix: str, ropes: tuple[int, ...]
) -> AttentionShape | ConvShape | StateShape:
    if layer in config.conv_layers:
        return _conv(config, prefix)
    if config.delta is not None and layer in config.delta.layers:
        return _delta(config, config.delta, f"{prefix}.linear_attn")
    if config.mamba is not None and layer in config.mamba.layers:
        return _mamba(config, config.mamba, f"{prefix}.{_names(config)['mamba']}")
    return _attention(config, layer, prefix, ropes)


def _names(config: ModelConfig) -> Mapping[str, str]:
    return FAMILIES[config.architecture].modules


def _makes(config: ModelConfig, layer: int) -> Makes:
    if config.kv_owner(layer) != layer:
        return "queries"
    keys_as_values = config.keys_as_values and config.window_of(layer) is None
    return "queries_and_keys" if keys_as_values else "all"


def _attention(
    config: ModelConfig, layer: int, prefix: str, ropes: tuple[int, ...]
) -> AttentionShape:
    heads, (kv_heads, head_dim) = config.num_heads, config.heads_of(config.window_of(layer))
    makes = _makes(config, layer)
    parts = {"all": "qkv", "queries_and_keys": "qk", "queries": "q"}[makes]
    counts = {part: heads if part == "q" else kv_heads for part in parts}
    hidden, names = config.hidden_size, _names(config)
    base = f"{prefix}.{names['attention']}"
    pieces: dict[str, Pieces | PairedHeads] = {}
    if FAMILIES[config.architecture].pairs_heads:
        rotated = config.rope_of(config.window_of(layer)).rotated_of(head_dim)
        for part in "qk":
            pieces[f"{base}.{part}_proj"] = PairedHeads(counts[part], head_dim, rotated)
    if config.output_gate:
        counts["q"] += heads
        pieces[f"{base}.q_proj"] = Pieces(heads, (head_dim, head_dim), (1, 0))
    qkv = {f"{base}.{part}_proj": count * head_dim for part, count in counts.items()}
    if "qkv" in names:
        qkv = {f"{prefix}.{names['qkv']}": sum(qkv.values())}
    q_norm = f"{prefix}.{names['q_norm']}"
    k_norm = f"{prefix}.{names['k_norm']}"
    out = f"{prefix}.{names['out']}"
    normed = {q_norm: heads} | ({} if makes == "queries" else {k_norm: kv_heads})
    return AttentionShape(
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv=LinearShape(hidden, qkv, config.qkv_bias, pieces),
        makes=makes,
        gated=config.output_gate,
        qk_norm=NormShape(head_dim, normed, whole_rows=config.whole_qk_norms)
        if config.qk_norm
        else None,
        value_norm=config.value_norms and makes != "queries",
        sinks=VectorShape(f"{prefix}.self_attn.sinks", heads) if config.sinks else None,
        out=LinearShape(heads * head_dim, {out: hidden}, config.output_bias),
        rope=ropes[0],
        query_rope=ropes[1],
    )


def _conv(config: ModelConfig, prefix: str) -> ConvShape:
    hidden, bias = config.hidden_size, config.conv_bias
    return ConvShape(
        in_proj=LinearShape(hidden, {f"{prefix}.conv.in_proj": 3 * hidden}, bias),
        name=f"{prefix}.conv.conv",
        taps=config.conv_taps,
        bias=bias,
        out=LinearShape(hidden, {f"{prefix}.conv.out_proj": hidden}, bias),
    )


def _delta(config: ModelConfig, delta: DeltaConfig, name: str) -> StateShape:
    heads, each = delta.key_heads, delta.value_heads // delta.key_heads
    outputs = {"qkv": delta.channels, "z": delta.values}
    pieces: dict[str, Pieces] = {}
    if delta.by_key_head and not delta.qkvz_apart:
        outputs = {"qkvz": delta.channels + delta.values}
        qkvz = (delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim)
        pieces[f"{name}.in_proj_qkvz"] = Pieces(heads, qkvz, (0, 1, 2, 3))
    if delta.by_key_head:
        outputs |= {"ba": 2 * delta.value_heads}
        pieces[f"{name}.in_proj_ba"] = Pieces(heads, (each, each), (0, 1))
    else:
        outputs |= dict.fromkeys("ba", delta.value_heads)
    parts = {f"{name}.in_proj_{part}": count for part, count in outputs.items()}
    return StateShape(
        in_proj=LinearShape(config.hidden_size, parts, pieces=pieces),
        name=name,
        states=delta,
        out=LinearShape(delta.values, {f"{name}.out_proj": config.hidden_size}),
    )


def _mamba(config: ModelConfig, mamba: MambaConfig, name: str) -> StateShape:
    keys, heads, values = mamba.key_heads * mamba.key_dim, mamba.value_heads, mamba.values
    # z, x, B, C and dt, which here are C, B, x, z and dt.
    pieces = Pieces(1, (values, values, keys, keys, heads), (3, 2, 1, 0, 4))
    in_proj, hidden = f"{name}.in_proj", config.hidden_size
    outputs = {in_proj: sum(pieces.sizes)}
    return StateShape(
        in_proj=LinearShape(hidden, outputs, mamba.bias, {in_proj: pieces}),
        name=name,
        states=mamba,
        out=LinearShape(values, {f"{name}.out_proj": hidden}, mamba.bias),
    )


def _feed_forward(
    config: ModelConfig, layer: int, prefix: str
) -> DenseShape | ExpertsShape | DenseAndExpertsShape:
    experts, size = config.experts, config.intermediate_size
    if config.kv_owner(layer) != layer:
        size = config.reader_intermediate_size or size
    if experts is None or layer in experts.dense_layers:
        return _dense(config, prefix, size, _names(config))
    if experts.next_to_mlp:
        return _dense_and_experts(config, experts, prefix, size)
    return _experts(config, experts, prefix)


def _dense_and_experts(
    config: ModelConfig, experts: ExpertsConfig, prefix: str, size: int
) -> DenseAndExpertsShape:
    hidden = config.hidden_size
    before, after = f"{prefix}.pre_feedforward_layernorm", f"{prefix}.post_feedforward_layernorm"
    return DenseAndExpertsShape(
        dense_norm=NormShape(hidden, {before: 1}),
        dense=_dense(config, prefix, size, _names(config)),
        dense_out_norm=NormShape(hidden, {f"{after}_1": 1}),
        router_norm=NormShape(hidden, {f"{prefix}.router": 1}, tensor="scale", factor=hidden**-0.5),
        experts_norm=NormShape(hidden, {f"{before}_2": 1}),
        experts=_experts(config, experts, prefix),
        experts_out_norm=NormShape(hidden, {f"{after}_2": 1}),
    )


def _experts(config: ModelConfig, experts: ExpertsConfig, prefix: str) -> ExpertsShape:
    hidden, size, names = config.hidden_size, experts.intermediate_size, _names(config)
    router = f"{prefix}.{names['router']}"
    base = f"{prefix}.{names['experts']}"
    each = [f"{base}.{i}" for i in range(experts.count)]
    gate, up, down = (names[part].rpartition(".")[2] for part in ("gate", "up", "down"))
    bias = VectorShape(f"{prefix}.{names.get('selection_bias', '')}", experts.count)
    scales = VectorShape(f"{prefix}.router.per_expert_scale", experts.count)
    shared = names["shared"]
    of_shared = {part: f"{shared}.{part}_proj" for part in ("gate", "up", "down")}
    weight = LinearShape(hidden, {f"{prefix}.{shared}_gate": 1})
    return ExpertsShape(
        router=LinearShape(hidden, {router: experts.count}, experts.router_bias),
        selection_bias=bias if experts.selection_bias else None,
        scales=scales if experts.next_to_mlp else None,
        gate_up=LinearShape(
            hidden,
            {f"{expert}.{part}": size for expert in each for part in (gate, up)},
            config.mlp_bias,
        ),
        down=LinearShape(size, {f"{expert}.{down}": hidden for expert in each}, config.mlp_bias),
        activation=config.activation,
        experts=experts,
        shared=_dense(config, prefix, experts.shared_size, of_shared)
        if experts.shared_size
        else None,
        shared_weight=weight if experts.shared_weight else None,
    )


def _dense(config: ModelConfig, prefix: str, size: int, names: Mapping[str, str]) -> DenseShape:
    hidden = config.hidden_size
    down = f"{prefix}.{names['down']}"
    return DenseShape(
        gate_up=LinearShape(
            hidden,
            _gate_up(prefix, names, size, is_gated=config.activation != "squared_relu"),
            config.mlp_bias,
        ),
        down=LinearShape(size, {down: hidden}, config.mlp_bias),
        activation=config.activation,
    )


def _gate_up(prefix: str, names: Mapping[str, str], size: int, *, is_gated: bool) -> dict[str, int]:
    """One tensor where it has a name, else two."""
    if "gate_up" in names:
        return {f"{prefix}.{names['gate_up']}": 2 * size}
    parts = [names[part] for part in ("gate", "up")]
    return {f"{prefix}.{part}": size for part in (parts if is_gated else parts[1:])}


def _rotations_of(config: ModelConfig, layer: int) -> tuple[Rotation, Rotation]:
    """Those of a layer's keys and of its queries."""
    window = config.window_of(layer)
    rope = config.rope_of(window)
    rotated = rope.rotated_of(config.heads_of(window)[1])
    if layer in config.unrotated_layers:
        return Rotation(None, rotated=rotated), Rotation(None, rotated=rotated)
    return Rotation(rope, rotated=rotated), Rotation(rope, config.query_growth, rotated)
