//! Short convolutions over the last tokens, whose inputs lie in a cache.

use prefixcache_attention::{KvElement, ShortConv, short_conv};
use prefixcache_cpu::memory::OutOfMemory;
use prefixcache_cpu::{Rows, RowsMut};
use prefixcache_ops::PackedLinear;

use crate::{Buffer, Step, Sum};

/// Gates and inputs, the convolution, and what becomes of it.
pub struct ShortConvMixer<'a, E> {
    /// E to 3 E: B, C and x.
    pub in_proj: &'a PackedLinear<E>,
    /// Over E channels.
    pub conv: ShortConv<'a, E>,
    /// E to E
    pub out: &'a PackedLinear<E>,
    /// Which of the step's groups the layer is of.
    pub group: usize,
}

/// Room for what passes between its kernels.
pub struct Scratch<E> {
    bcx: Buffer<E>,
    convolved: Buffer<E>,
}

impl<E: KvElement> Scratch<E> {
    pub fn new<'a>(
        rows: usize,
        mixers: impl Iterator<Item = &'a ShortConvMixer<'a, E>> + Clone,
    ) -> Result<Self, OutOfMemory> {
        Ok(Self {
            bcx: Buffer::new(rows, mixers.clone().map(|mixer| mixer.in_proj.outputs()))?,
            convolved: Buffer::new(rows, mixers.map(|mixer| mixer.out.inputs()))?,
        })
    }
}

impl Step<'_> {
    /// Adds the convolution of the normalised stream to the stream.
    pub(crate) fn convolve<E: KvElement>(
        &self,
        mixer: &ShortConvMixer<'_, E>,
        cache: &mut RowsMut<'_, E>,
        x: Rows<'_, E>,
        scratch: &mut Scratch<E>,
        sum: Sum<'_, E>,
    ) -> Result<(), OutOfMemory> {
        let group = &self.groups[mixer.group];
        let channels = mixer.out.inputs();
        let mut bcx = scratch.bcx.write(3 * channels);
        self.linear(mixer.in_proj, x, None, &bcx)?;
        short_conv(
            self.form,
            self.team,
            (group.plan, group.slots),
            &mixer.conv,
            cache,
            &mut bcx,
            &scratch.convolved.write(channels),
        );
        let convolved = scratch.convolved.read(channels);
        self.add(sum, |residual, out| self.linear(mixer.out, convolved, residual, out))
    }
}
