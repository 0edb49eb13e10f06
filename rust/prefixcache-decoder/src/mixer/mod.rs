//! What takes from other tokens.

pub(crate) mod attention;
pub(crate) mod delta;
pub(crate) mod short_conv;

use attention::AttentionMixer;
use delta::DeltaMixer;
use short_conv::ShortConvMixer;

/// The mixer of a layer.
pub enum Mixer<'a, E> {
    /// Attention over keys and values.
    Attention(AttentionMixer<'a, E>),
    /// A convolution over the last tokens.
    ShortConv(ShortConvMixer<'a, E>),
    /// The gated delta rule, or Mamba-2, over states.
    Delta(DeltaMixer<'a, E>),
}
