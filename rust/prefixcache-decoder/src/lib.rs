//! The layers of a decoder of the Llama family, Gemma 3 included, one call a step.
//!
//! What layers differ in is data: which norms there are, the gate, the rotation and the group of
//! layers whose attention and block tables they share.
//!
//! It calls the kernels of `prefixcache-ops` and `prefixcache-attention` in the order in which a
//! model calls them one by one, and rounds where that does: the bits are the same. What it saves is
//! the way between two kernels, which at a few rows takes as long as a small kernel.
//!
//! Letters of shapes: T tokens in the step, E hidden size, F intermediate size, H query heads, K
//! key-value heads, D head size.

use prefixcache_attention::{Attention, KvElement, Plan, append, attend};
use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::{Form, Rows, RowsMut, Team};
use prefixcache_ops::PackedLinear;
use prefixcache_ops::rowwise::{Gate, RmsNorm, gated, rms_norm, rotate};

/// A layer: attention, then a gated MLP, each behind a norm and with a residual connection.
pub struct DecoderLayer<'a, E> {
    /// Of E numbers.
    pub input_norm: RmsNorm<'a, E>,
    /// E to (H + 2 K) * D: queries, keys, values.
    pub qkv: &'a PackedLinear<E>,
    /// Of (H + K) * D numbers, a head a group: the norm of queries and keys, where there is one.
    pub qk_norm: Option<RmsNorm<'a, E>>,
    /// H * D to E
    pub out: &'a PackedLinear<E>,
    /// Of E numbers: the norm of what attention adds to the residual, where there is one.
    pub attention_out_norm: Option<RmsNorm<'a, E>>,
    /// Of E numbers.
    pub mlp_norm: RmsNorm<'a, E>,
    /// E to 2 F: gates, then what they let pass.
    pub gate_up: &'a PackedLinear<E>,
    /// What opens the gates.
    pub gate: Gate,
    /// F to E
    pub down: &'a PackedLinear<E>,
    /// Of E numbers: the norm of what the MLP adds to the residual, where there is one.
    pub mlp_out_norm: Option<RmsNorm<'a, E>>,
    /// Which of the step's groups the layer is of.
    pub group: usize,
    /// Which of the step's rotations turns its keys.
    pub rope: usize,
    /// Which of them turns its queries.
    pub query_rope: usize,
}

/// What is the same for all layers of a step.
pub struct Step<'a> {
    /// The instructions to compute with.
    pub form: Form,
    /// The threads to compute with.
    pub team: &'a Team,
    /// The groups of layers with the same attention.
    pub groups: &'a [Group<'a>],
    /// The model's rotations at the tokens' positions.
    pub rotations: &'a [Rotation<'a>],
}

/// What is the same for all layers of a group.
pub struct Group<'a> {
    /// Where the tokens stand, and the constants of their attention.
    pub plan: &'a Plan,
    /// `[T]`: where their keys and values go.
    pub slots: &'a [i64],
}

/// The angles by which queries and keys are turned.
pub struct Rotation<'a> {
    /// `[T, D / 2]`: cosines of the tokens' positions.
    pub cos: Rows<'a, f32>,
    /// `[T, D / 2]`: sines of them.
    pub sin: Rows<'a, f32>,
}

/// A matrix of one row a token, dense.
struct Buffer<E> {
    numbers: Vec<E>,
    width: usize,
}

impl<E: KvElement> Buffer<E> {
    fn new(rows: usize, width: usize) -> Result<Self, OutOfMemory> {
        let numbers = filled(E::from_f32(0.0), rows, width)?;
        Ok(Self { numbers, width })
    }

    fn read(&self) -> Rows<'_, E> {
        Rows::new(&self.numbers, self.width)
    }

    fn write(&mut self) -> RowsMut<'_, E> {
        RowsMut::new(&mut self.numbers, self.width)
    }
}

/// Room for what passes between the kernels of a layer; one layer after the other uses it.
pub struct Scratch<E> {
    normed: Buffer<E>,
    qkv: Buffer<E>,
    qk: Buffer<E>,
    turned: Buffer<E>,
    attended: Buffer<E>,
    projected: Buffer<E>,
    residual: Buffer<E>,
    gate_up: Buffer<E>,
    opened: Buffer<E>,
}

impl<E: KvElement> Scratch<E> {
    /// Room for `rows` tokens in layers of these heads, which are shaped as this one.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new(
        rows: usize,
        attention: &Attention,
        layer: &DecoderLayer<'_, E>,
    ) -> Result<Self, OutOfMemory> {
        let buffer = |width| Buffer::new(rows, width);
        let needed = |needed: bool, width| buffer(if needed { width } else { 0 });
        let turned = (attention.heads() + attention.kv_heads()) * attention.head_dim();
        let normed_out = layer.attention_out_norm.is_some() || layer.mlp_out_norm.is_some();
        Ok(Self {
            normed: buffer(layer.qkv.inputs())?,
            qkv: buffer(layer.qkv.outputs())?,
            qk: needed(layer.qk_norm.is_some(), turned)?,
            turned: buffer(turned)?,
            attended: buffer(layer.out.inputs())?,
            projected: needed(normed_out, layer.out.outputs())?,
            residual: buffer(layer.out.outputs())?,
            gate_up: buffer(layer.gate_up.outputs())?,
            opened: buffer(layer.down.inputs())?,
        })
    }
}

impl Step<'_> {
    /// Takes the residual stream `x` [T, E] through a layer, in place; writes the tokens' keys and
    /// values to `cache` [P * 2 * K, B * D].
    ///
    /// # Errors
    /// There is no memory for the attention's sums or for quantized activations; `x` is as it was, the
    /// cache may be written.
    ///
    /// # Panics
    /// The shapes do not fit each other, the plan or the scratch, or there is no such group or
    /// rotation.
    pub fn forward<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        cache: &mut RowsMut<'_, E>,
        x: &mut RowsMut<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        self.attend(layer, cache, x.read(), scratch)?;
        self.feed_forward(layer, scratch, x)
    }

    /// Leaves x with attention added in the scratch's residual.
    fn attend<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        cache: &mut RowsMut<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        let group = &self.groups[layer.group];
        let attention = group.plan.attention();
        let queries = attention.heads() * attention.head_dim();
        self.norm(layer.input_norm, x, None, &scratch.normed.write());
        self.linear(layer.qkv, scratch.normed.read(), None, &scratch.qkv.write())?;
        self.turn(layer, scratch);
        let turned = scratch.turned.read();
        let keys = turned.columns(queries..turned.width());
        let values = scratch.qkv.read();
        let values = values.columns(turned.width()..values.width());
        append(cache, group.plan.block_size(), group.slots, keys, values);
        attend(
            self.form,
            self.team,
            group.plan,
            cache.read(),
            turned.columns(0..queries),
            &scratch.attended.write(),
        )?;
        let (norm, attended) = (layer.attention_out_norm, scratch.attended.read());
        let (projected, residual) = (&mut scratch.projected, scratch.residual.write());
        self.project(layer.out, norm, attended, x, projected, &residual)
    }

    /// Writes the scratch's residual with the MLP added to x.
    fn feed_forward<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        scratch: &mut Scratch<E>,
        x: &RowsMut<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let (normed, gate_up) = (&mut scratch.normed, &mut scratch.gate_up);
        let (opened, residual) = (&mut scratch.opened, scratch.residual.read());
        self.norm(layer.mlp_norm, residual, None, &normed.write());
        self.linear(layer.gate_up, normed.read(), None, &gate_up.write())?;
        let gates = gate_up.read();
        gated(self.form, self.team, layer.gate, gates, &opened.write());
        let (norm, projected) = (layer.mlp_out_norm, &mut scratch.projected);
        self.project(layer.down, norm, opened.read(), residual, projected, x)
    }

    /// Normalises the queries and keys, where the model does, and turns them by their positions.
    fn turn<E: KvElement>(&self, layer: &DecoderLayer<'_, E>, scratch: &mut Scratch<E>) {
        let mut qk = scratch.qkv.read().columns(0..scratch.turned.width);
        if let Some(norm) = layer.qk_norm {
            self.norm(norm, qk, None, &scratch.qk.write());
            qk = scratch.qk.read();
        }
        let (queries, all) = (layer.out.inputs(), qk.width());
        let ropes = if layer.query_rope == layer.rope {
            &[(layer.rope, 0..all)][..]
        } else {
            &[(layer.query_rope, 0..queries), (layer.rope, queries..all)]
        };
        for (rope, columns) in ropes {
            let Rotation { cos, sin } = self.rotations[*rope];
            let qk = qk.columns(columns.clone());
            let mut turned = scratch.turned.write();
            let turned = turned.columns(columns.clone());
            rotate(self.form, self.team, cos, sin, qk, &turned);
        }
    }

    /// Writes the residual plus what the linear makes of x, normalised where there is a norm.
    fn project<E: KvElement>(
        &self,
        linear: &PackedLinear<E>,
        norm: Option<RmsNorm<'_, E>>,
        x: Rows<'_, E>,
        residual: Rows<'_, E>,
        projected: &mut Buffer<E>,
        out: &RowsMut<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let Some(norm) = norm else {
            return self.linear(linear, x, Some(residual), out);
        };
        self.linear(linear, x, None, &projected.write())?;
        self.norm(norm, projected.read(), Some(residual), out);
        Ok(())
    }

    fn norm<E: KvElement>(
        &self,
        norm: RmsNorm<'_, E>,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, E>>,
        out: &RowsMut<'_, E>,
    ) {
        rms_norm(self.form, self.team, norm, x, residual, out);
    }

    fn linear<E: KvElement>(
        &self,
        linear: &PackedLinear<E>,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, E>>,
        out: &RowsMut<'_, E>,
    ) -> Result<(), OutOfMemory> {
        linear.forward(self.form, self.team, x, residual, out)
    }
}
