//! The layers of a decoder, one call a step.
//!
//! A layer is a mixer, which takes from other tokens, and a feed-forward, which does not. Each may have
//! a norm before it and one after it, and adds to the residual stream. What layers differ in is data:
//! the layers of one stack may have other mixers and feed-forwards.
//!
//! It calls the kernels of `prefixcache-ops` and `prefixcache-attention` in the order in which a
//! model calls them one by one, and rounds where that does: the bits are the same. What it saves is
//! the way between two kernels, which at a few rows takes as long as a small kernel.
//!
//! Letters of shapes: T tokens in the step, E hidden size, F intermediate size, H query heads, K
//! key-value heads, D head size.

mod feed_forward;
mod mixer;

use prefixcache_attention::{KvElement, KvPagesMut, Plan};
use prefixcache_cpu::memory::{OutOfMemory, filled};
use prefixcache_cpu::{Form, Rows, RowsMut, Team};
use prefixcache_ops::PackedLinear;
use prefixcache_ops::rowwise::{Gate, RmsNorm, add_and_scale, gated, rms_norm};

pub use feed_forward::{Dense, DenseAndExperts, FeedForward};
pub use mixer::Mixer;
pub use mixer::attention::{AttentionMixer, Makes};
pub use mixer::delta::DeltaMixer;
pub use mixer::short_conv::ShortConvMixer;

/// A layer: a mixer, then a feed-forward, each with a residual connection; then what it makes of an
/// input of its own, where it has one.
pub struct DecoderLayer<'a, E> {
    /// Of E numbers: the norm of what the mixer reads, where there is one.
    pub input_norm: Option<RmsNorm<'a, E>>,
    /// What takes from other tokens.
    pub mixer: Mixer<'a, E>,
    /// Of E numbers: the norm of what the mixer adds to the residual, where there is one.
    pub mixer_out_norm: Option<RmsNorm<'a, E>>,
    /// Of E numbers: the norm of what the feed-forward reads, where there is one.
    pub mlp_norm: Option<RmsNorm<'a, E>>,
    /// What each token computes alone, if anything.
    pub feed_forward: Option<FeedForward<'a, E>>,
    /// Of E numbers: the norm of what the feed-forward adds to the residual, where there is one. A sum
    /// of an MLP and experts must have one.
    pub mlp_out_norm: Option<RmsNorm<'a, E>>,
    /// What takes the layer's own input in, where it has one.
    pub own_input: Option<OwnInput<'a, E>>,
    /// What the stream is multiplied by in the end.
    pub scale: Option<f32>,
}

/// Adds to the stream what its gates let pass of an input of I numbers, which no other layer has.
pub struct OwnInput<'a, E> {
    /// E to I
    pub gate: &'a PackedLinear<E>,
    /// What opens the gates.
    pub activation: Gate,
    /// I to E
    pub out: &'a PackedLinear<E>,
    /// Of E numbers: the norm of what is added.
    pub norm: RmsNorm<'a, E>,
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
    /// `[S]`: how many of a sequence's last tokens are guesses, whose states are not kept; none where it is empty.
    pub guesses: &'a [usize],
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
    /// `[T, R]`: cosines of the tokens' positions, of the first 2 R numbers of a head.
    pub cos: Rows<'a, f32>,
    /// `[T, R]`: sines of them.
    pub sin: Rows<'a, f32>,
}

/// Room for a matrix of one row a token, dense, of at most a given width.
struct Buffer<E> {
    numbers: Vec<E>,
    rows: usize,
}

impl<E: KvElement> Buffer<E> {
    /// Room for the widest of these widths.
    fn new(rows: usize, widths: impl Iterator<Item = usize>) -> Result<Self, OutOfMemory> {
        let numbers = filled(E::from_f32(0.0), rows, widths.max().unwrap_or(0))?;
        Ok(Self { numbers, rows })
    }

    fn read(&self, width: usize) -> Rows<'_, E> {
        Rows::new(&self.numbers[..self.rows * width], width)
    }

    fn write(&mut self, width: usize) -> RowsMut<'_, E> {
        RowsMut::new(&mut self.numbers[..self.rows * width], width)
    }
}

/// Room for what passes between the kernels of a layer; one layer after the other uses it.
pub struct Scratch<E> {
    normed: Buffer<E>,
    projected: Buffer<E>,
    residual: Buffer<E>,
    /// Gates, and the layer's own input.
    gates: Buffer<E>,
    opened: Buffer<E>,
    attention: mixer::attention::Scratch<E>,
    short_conv: mixer::short_conv::Scratch<E>,
    delta: mixer::delta::Scratch<E>,
    feed_forward: feed_forward::Scratch<E>,
}

impl<E: KvElement> Scratch<E> {
    /// Room for `rows` tokens of a stream of `hidden` numbers in any of these layers.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn new(
        rows: usize,
        hidden: usize,
        layers: &[DecoderLayer<'_, E>],
    ) -> Result<Self, OutOfMemory> {
        let needed = |is_needed: fn(&DecoderLayer<'_, E>) -> bool| {
            let is_needed = layers.iter().any(is_needed);
            Buffer::new(rows, is_needed.then_some(hidden).into_iter())
        };
        let of_attention = layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Attention(mixer) => Some(mixer),
            _ => None,
        });
        let of_short_conv = layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::ShortConv(mixer) => Some(mixer),
            _ => None,
        });
        let of_delta = layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::Delta(mixer) => Some(mixer),
            _ => None,
        });
        let widths = |times: usize| {
            let inputs = layers.iter().filter_map(|layer| layer.own_input.as_ref());
            inputs.map(move |input| times * input.out.inputs())
        };
        Ok(Self {
            normed: needed(|layer| layer.input_norm.is_some() || layer.mlp_norm.is_some())?,
            projected: needed(|layer| {
                let normed = layer.mixer_out_norm.is_some() || layer.mlp_out_norm.is_some();
                normed || layer.own_input.is_some()
            })?,
            residual: needed(|_| true)?,
            gates: Buffer::new(rows, widths(2))?,
            opened: Buffer::new(rows, widths(1))?,
            attention: mixer::attention::Scratch::new(rows, of_attention)?,
            short_conv: mixer::short_conv::Scratch::new(rows, of_short_conv)?,
            delta: mixer::delta::Scratch::new(rows, of_delta)?,
            feed_forward: feed_forward::Scratch::new(
                rows,
                layers.iter().filter_map(|layer| layer.feed_forward.as_ref()),
            )?,
        })
    }
}

/// A place in the residual stream, to which a part of a layer adds.
struct Sum<'a, E> {
    /// The stream before the part; none where what the part makes is all.
    residual: Option<Rows<'a, E>>,
    /// The norm of what is added, where there is one.
    norm: Option<RmsNorm<'a, E>>,
    /// Room for what is added, where it is normalised.
    projected: &'a mut Buffer<E>,
    /// The stream after the part.
    out: &'a RowsMut<'a, E>,
}

impl Step<'_> {
    /// Takes the residual stream `x` [T, E] through a layer, in place; writes the tokens' keys and
    /// values to `cache`, or the inputs of a convolution to `cache` [P, kept * E], which has numbers.
    /// `own` [T, I] is the input that the layer alone has, where it has one.
    /// States have places of their own.
    ///
    /// # Errors
    /// There is no memory for the attention's sums or for quantized activations; `x` is as it was, the
    /// cache may be written.
    ///
    /// # Panics
    /// The shapes do not fit each other, the plan or the scratch, there is no such group or
    /// rotation, or a convolution is given codes.
    pub fn forward<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        cache: &mut KvPagesMut<'_, E>,
        own: Option<Rows<'_, E>>,
        x: &mut RowsMut<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        self.mix(layer, cache, x.read(), scratch)?;
        self.feed_forward(layer, scratch, x)?;
        let added = match &layer.own_input {
            Some(input) => Some(self.taken_in(input, own, x.read(), scratch)?),
            None => None,
        };
        if added.is_some() || layer.scale.is_some() {
            add_and_scale(self.form, self.team, added, layer.scale.unwrap_or(1.0), x);
        }
        Ok(())
    }

    /// What the gates, which the stream opens, let pass of the layer's own input.
    fn taken_in<'b, E: KvElement>(
        &self,
        input: &OwnInput<'_, E>,
        own: Option<Rows<'_, E>>,
        x: Rows<'_, E>,
        scratch: &'b mut Scratch<E>,
    ) -> Result<Rows<'b, E>, OutOfMemory> {
        let (width, hidden) = (input.out.inputs(), x.width());
        let own = own.expect("the layer has an input of its own");
        let mut gates = scratch.gates.write(2 * width);
        self.linear(input.gate, x, None, &gates.columns(0..width))?;
        copy_rows(own, &gates.columns(width..2 * width));
        let opened = scratch.opened.write(width);
        gated(self.form, self.team, input.activation, gates.read(), &opened);
        let projected = scratch.projected.write(hidden);
        self.linear(input.out, scratch.opened.read(width), None, &projected)?;
        let normed = scratch.residual.write(hidden);
        self.norm(input.norm, scratch.projected.read(hidden), None, &normed);
        Ok(scratch.residual.read(hidden))
    }

    /// Leaves x with what the mixer adds in the scratch's residual.
    fn mix<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        cache: &mut KvPagesMut<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
    ) -> Result<(), OutOfMemory> {
        let normed = self.normed(layer.input_norm, x, &mut scratch.normed);
        let sum = Sum {
            residual: Some(x),
            norm: layer.mixer_out_norm,
            projected: &mut scratch.projected,
            out: &scratch.residual.write(x.width()),
        };
        match &layer.mixer {
            Mixer::Attention(mixer) => {
                self.attend(mixer, cache, normed, &mut scratch.attention, sum)
            }
            Mixer::ShortConv(mixer) => {
                let KvPagesMut::Numbers(cache) = cache else {
                    panic!("a convolution keeps numbers");
                };
                self.convolve(mixer, cache, normed, &mut scratch.short_conv, sum)
            }
            Mixer::Delta(mixer) => self.read_states(mixer, normed, &mut scratch.delta, sum),
        }
    }

    /// Writes the scratch's residual with what the feed-forward adds to x.
    fn feed_forward<E: KvElement>(
        &self,
        layer: &DecoderLayer<'_, E>,
        scratch: &mut Scratch<E>,
        x: &RowsMut<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let residual = scratch.residual.read(x.width());
        let Some(feed_forward) = &layer.feed_forward else {
            copy_rows(residual, x);
            return Ok(());
        };
        let normed = self.normed(layer.mlp_norm, residual, &mut scratch.normed);
        let sum = Sum {
            residual: Some(residual),
            norm: layer.mlp_out_norm,
            projected: &mut scratch.projected,
            out: x,
        };
        self.fed(feed_forward, normed, &mut scratch.feed_forward, sum)
    }

    /// The rows normalised, or as they are where there is no norm.
    fn normed<'b, E: KvElement>(
        &self,
        norm: Option<RmsNorm<'_, E>>,
        x: Rows<'b, E>,
        room: &'b mut Buffer<E>,
    ) -> Rows<'b, E> {
        let Some(norm) = norm else { return x };
        self.norm(norm, x, None, &room.write(x.width()));
        room.read(x.width())
    }

    /// Writes the residual plus what `part` computes, normalised where there is a norm. `part` adds the
    /// residual that it is given.
    fn add<E: KvElement>(
        &self,
        sum: Sum<'_, E>,
        part: impl FnOnce(Option<Rows<'_, E>>, &RowsMut<'_, E>) -> Result<(), OutOfMemory>,
    ) -> Result<(), OutOfMemory> {
        let Some(norm) = sum.norm else {
            return part(sum.residual, sum.out);
        };
        let width = sum.out.width();
        part(None, &sum.projected.write(width))?;
        self.norm(norm, sum.projected.read(width), sum.residual, sum.out);
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

fn copy_rows<E: KvElement>(from: Rows<'_, E>, to: &RowsMut<'_, E>) {
    assert_eq!(from.shape(), to.shape(), "shape of the rows");
    for row in 0..from.rows() {
        // SAFETY: this thread alone uses the rows now.
        unsafe { to.part(row, 0, to.width()) }.copy_from_slice(from.row(row));
    }
}
