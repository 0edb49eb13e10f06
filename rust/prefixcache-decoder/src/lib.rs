//! The layers of a Llama-like decoder, one call a step.
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
use prefixcache_ops::rowwise::{Gate, gated, rms_norm, rotate};

/// The weights of a layer: attention, then a gated MLP, each behind a norm.
pub struct DecoderLayer<'a, E> {
    /// `[E]`
    pub input_norm: &'a [E],
    /// E to (H + 2 K) * D: queries, keys, values.
    pub qkv: &'a PackedLinear<E>,
    /// `[(H + K) * D]`: the norm of each query and key head, where there is one.
    pub qk_norm: Option<&'a [E]>,
    /// H * D to E
    pub out: &'a PackedLinear<E>,
    /// `[E]`
    pub post_norm: &'a [E],
    /// E to 2 F: gates, then what they let pass.
    pub gate_up: &'a PackedLinear<E>,
    /// F to E
    pub down: &'a PackedLinear<E>,
}

/// What is the same for all layers of a step.
pub struct Step<'a> {
    /// The instructions to compute with.
    pub form: Form,
    /// The threads to compute with.
    pub team: &'a Team,
    /// The constants of the model's attention.
    pub attention: &'a Attention,
    /// Added to a norm's mean square.
    pub eps: f32,
    /// Where the tokens stand.
    pub plan: &'a Plan,
    /// `[T]`: where their keys and values go.
    pub slots: &'a [i64],
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
    residual: Buffer<E>,
    gate_up: Buffer<E>,
    opened: Buffer<E>,
}

impl<E: KvElement> Scratch<E> {
    /// Room for `rows` tokens in layers shaped as this one.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new(
        rows: usize,
        attention: &Attention,
        layer: &DecoderLayer<'_, E>,
    ) -> Result<Self, OutOfMemory> {
        let buffer = |width| Buffer::new(rows, width);
        let turned = (attention.heads() + attention.kv_heads()) * attention.head_dim();
        Ok(Self {
            normed: buffer(layer.qkv.inputs())?,
            qkv: buffer(layer.qkv.outputs())?,
            qk: buffer(if layer.qk_norm.is_some() { turned } else { 0 })?,
            turned: buffer(turned)?,
            attended: buffer(layer.out.inputs())?,
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
    /// There is no memory for the attention's sums; `x` is as it was, the cache is written.
    ///
    /// # Panics
    /// The shapes do not fit each other, the plan or the scratch.
    pub fn forward<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        cache: &mut RowsMut<'_, E>,
        x: &mut RowsMut<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        self.attend(layer, cache, x.read(), scratch)?;
        let Scratch {
            normed,
            residual,
            gate_up,
            opened,
            ..
        } = scratch;
        self.norm(residual.read(), layer.post_norm, &normed.write());
        self.linear(layer.gate_up, normed.read(), None, &gate_up.write());
        let (form, team) = (self.form, self.team);
        gated(form, team, Gate::Silu, gate_up.read(), &opened.write());
        self.linear(layer.down, opened.read(), Some(residual.read()), x);
        Ok(())
    }

    /// Leaves x with attention added in the scratch's residual.
    fn attend<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        cache: &mut RowsMut<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        let queries = self.attention.heads() * self.attention.head_dim();
        self.norm(x, layer.input_norm, &scratch.normed.write());
        self.linear(layer.qkv, scratch.normed.read(), None, &scratch.qkv.write());
        self.turn(layer.qk_norm, scratch);
        let turned = scratch.turned.read();
        let keys = turned.columns(queries..turned.width());
        let values = scratch.qkv.read();
        let values = values.columns(turned.width()..values.width());
        append(cache, self.plan.block_size(), self.slots, keys, values);
        attend(
            self.form,
            self.team,
            self.plan,
            cache.read(),
            turned.columns(0..queries),
            &scratch.attended.write(),
        )?;
        let residual = scratch.residual.write();
        self.linear(layer.out, scratch.attended.read(), Some(x), &residual);
        Ok(())
    }

    /// Normalises the queries and keys, where the model does, and turns them by their positions.
    fn turn<E: KvElement>(&self, qk_norm: Option<&[E]>, scratch: &mut Scratch<E>) {
        let mut qk = scratch.qkv.read().columns(0..scratch.turned.width);
        if let Some(weight) = qk_norm {
            let (group, out) = (self.attention.head_dim(), scratch.qk.write());
            rms_norm(self.form, self.team, qk, weight, group, self.eps, &out);
            qk = scratch.qk.read();
        }
        let out = scratch.turned.write();
        rotate(self.form, self.team, self.cos, self.sin, qk, &out);
    }

    fn norm<E: KvElement>(&self, x: Rows<'_, E>, weight: &[E], out: &RowsMut<'_, E>) {
        rms_norm(self.form, self.team, x, weight, weight.len(), self.eps, out);
    }

    fn linear<E: KvElement>(
        &self,
        layer: &PackedLinear<E>,
        x: Rows<'_, E>,
        residual: Option<Rows<'_, E>>,
        out: &RowsMut<'_, E>,
    ) {
        layer.forward(self.form, self.team, x, residual, out);
    }
}
