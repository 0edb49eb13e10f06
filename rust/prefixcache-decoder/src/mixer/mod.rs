//! What takes from other tokens.

pub(crate) mod attention;

use attention::AttentionMixer;

/// The mixer of a layer.
pub enum Mixer<'a, E> {
    /// Attention over keys and values.
    Attention(AttentionMixer<'a, E>),
}
