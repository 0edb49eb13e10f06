//! Attention over keys and values that lie in a cache.

use prefixcache_attention::{KvElement, KvPagesMut, attend};
use prefixcache_cpu::Rows;
use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_ops::PackedLinear;
use prefixcache_ops::rowwise::{RmsNorm, open, rotate};

use crate::{Buffer, Rotation, Step, Sum};

/// Queries, keys and values, attention, and what becomes of it.
pub struct AttentionMixer<'a, E> {
    /// E to (H + 2 K) * D: queries, keys, values, as far as the layer makes them; before them H * D gates,
    /// where it is gated.
    pub qkv: &'a PackedLinear<E>,
    /// Which of them it makes.
    pub makes: Makes,
    /// Whether what heads make is multiplied by the sigmoid of gates.
    pub gated: bool,
    /// Of (H + K) * D numbers, a head a group: the norm of queries and keys, where there is one.
    pub qk_norm: Option<RmsNorm<'a, E>>,
    /// Of K * D numbers: that of keys, where `qk_norm` is of all H * D queries at once.
    pub key_norm: Option<RmsNorm<'a, E>>,
    /// Of K * D numbers, a head a group: that of values, where there is one.
    pub value_norm: Option<RmsNorm<'a, E>>,
    /// Of H numbers: the heads' sinks, where there are some.
    pub sinks: Option<&'a [f32]>,
    /// H * D to E
    pub out: &'a PackedLinear<E>,
    /// Which of the step's groups the layer is of.
    pub group: usize,
    /// Which of the step's rotations turns its keys.
    pub rope: usize,
    /// Which of them turns its queries.
    pub query_rope: usize,
}

/// What the first linear of attention makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Makes {
    /// Queries, keys and values.
    All,
    /// Queries and keys. Values are the keys, neither normalised as they are nor turned.
    QueriesAndKeys,
    /// Queries. Keys and values are those that an earlier layer wrote to the cache.
    Queries,
}

impl<E: KvElement> AttentionMixer<'_, E> {
    /// Gates of a token.
    fn gates(&self) -> usize {
        if self.gated { self.out.inputs() } else { 0 }
    }

    /// Numbers of a token's queries, and of its keys, if the layer makes them.
    fn turned(&self) -> usize {
        let made = self.qkv.outputs() - self.gates();
        match self.makes {
            Makes::All => usize::midpoint(self.out.inputs(), made),
            Makes::QueriesAndKeys | Makes::Queries => made,
        }
    }
}

/// Room for what passes between its kernels.
pub struct Scratch<E> {
    qkv: Buffer<E>,
    qk: Buffer<E>,
    turned: Buffer<E>,
    values: Buffer<E>,
    attended: Buffer<E>,
}

impl<E: KvElement> Scratch<E> {
    pub fn new<'a>(
        rows: usize,
        mixers: impl Iterator<Item = &'a AttentionMixer<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        let of = |width: fn(&AttentionMixer<'_, E>) -> usize| {
            Buffer::new(rows, mixers.clone().map(width))
        };
        Ok(Self {
            qkv: of(|mixer| mixer.qkv.outputs())?,
            qk: of(|mixer| mixer.qk_norm.map_or(0, |_| mixer.turned()))?,
            turned: of(|mixer| mixer.turned())?,
            values: of(|mixer| {
                (mixer.value_norm).map_or(0, |_| mixer.turned() - mixer.out.inputs())
            })?,
            attended: of(|mixer| mixer.out.inputs())?,
        })
    }
}

impl Step<'_> {
    /// Adds attention of the normalised stream to the stream.
    pub(crate) fn attend<E: KvElement>(
        &self,
        mixer: &AttentionMixer<'_, E>,
        cache: &mut KvPagesMut<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let group = &self.groups[mixer.group];
        let queries = mixer.out.inputs();
        let (width, gates) = (mixer.qkv.outputs(), mixer.gates());
        self.linear(mixer.qkv, x, None, &scratch.qkv.write(width))?;
        self.turn(mixer, scratch);
        if mixer.makes != Makes::Queries {
            self.keep(mixer, cache, scratch);
        }
        let qkv = scratch.qkv.read(width);
        let turned = scratch.turned.read(mixer.turned());
        attend(
            self.form,
            self.team,
            group.plan,
            cache.read(),
            turned.columns(0..queries),
            mixer.sinks,
            &scratch.attended.write(queries),
        )?;
        let mut attended = scratch.attended.read(queries);
        if mixer.gated {
            let opened = scratch.turned.write(queries); // which nobody reads any more
            open(self.form, self.team, qkv.columns(0..gates), attended, &opened);
            attended = scratch.turned.read(queries);
        }
        self.add(sum, |residual, out| self.linear(mixer.out, attended, residual, out))
    }

    /// Writes the turned keys to the cache, and the values, normalised where the model does that.
    fn keep<E: KvElement>(
        &self,
        mixer: &AttentionMixer<'_, E>,
        cache: &KvPagesMut<'_, E>,
        scratch: &mut Scratch<E>,
    ) {
        let (width, turned) = (mixer.qkv.outputs(), mixer.turned());
        let keys = mixer.out.inputs()..turned;
        let made = scratch.qkv.read(width).columns(mixer.gates()..width);
        let mut values = match mixer.makes {
            Makes::All => made.columns(turned..made.width()),
            Makes::QueriesAndKeys | Makes::Queries => made.columns(keys.clone()),
        };
        if let Some(norm) = mixer.value_norm {
            self.norm(norm, values, None, &scratch.values.write(keys.len()));
            values = scratch.values.read(keys.len());
        }
        let keys = scratch.turned.read(turned).columns(keys);
        let group = &self.groups[mixer.group];
        cache.append(self.form, self.team, group.plan, group.slots, keys, values);
    }

    /// Normalises the queries and keys, where the model does, and turns them by their positions.
    fn turn<E: KvElement>(&self, mixer: &AttentionMixer<'_, E>, scratch: &mut Scratch<E>) {
        let (queries, all) = (mixer.out.inputs(), mixer.turned());
        let qkv = scratch.qkv.read(mixer.qkv.outputs());
        let mut qk = qkv.columns(mixer.gates()..mixer.gates() + all);
        if let Some(norm) = mixer.qk_norm {
            let mut normed = scratch.qk.write(all);
            let of_queries = if mixer.key_norm.is_some() { queries } else { all };
            let (first, last) = (0..of_queries, of_queries..all);
            self.norm(norm, qk.columns(first.clone()), None, &normed.columns(first));
            if let Some(norm) = mixer.key_norm {
                self.norm(norm, qk.columns(last.clone()), None, &normed.columns(last));
            }
            qk = scratch.qk.read(all);
        }
        let ropes = if mixer.query_rope == mixer.rope {
            &[(mixer.rope, 0..all)][..]
        } else {
            &[(mixer.query_rope, 0..queries), (mixer.rope, queries..all)]
        };
        let head = self.groups[mixer.group].plan.attention().head_dim();
        for (rope, columns) in ropes {
            let Rotation { cos, sin } = self.rotations[*rope];
            let qk = qk.columns(columns.clone());
            let mut turned = scratch.turned.write(all);
            let turned = turned.columns(columns.clone());
            rotate(self.form, self.team, cos, sin, head, qk, &turned);
        }
    }
}
