//! A retention hint in the words next to a block's record: who asked for the block's priority, and until when.
//!
//! The end is a time of the system's clock, in milliseconds since 1970. That clock may be set meanwhile: what is left of a
//! TTL is never more than the TTL.

use std::time::{SystemTime, UNIX_EPOCH};

use prefixcache_core::backing::KeptHint;
use prefixcache_core::band::Band;
use prefixcache_core::hints::Owner;
use twox_hash::XxHash3_64;

use crate::layout::HINT_WORDS;

/// For ever.
const NEVER: u64 = u64::MAX;
/// In the place of an owner; no name is known that has this digest.
const NOBODY: [u8; 16] = [0; 16];

/// All but the check.
pub(crate) type HintWords = [u64; HINT_WORDS - 1];

/// Milliseconds of the system's clock.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64)
}

/// Ties words to a priority and to content, of which one word of its hash is given.
pub(crate) fn check(words: HintWords, band: Band, content: u64) -> u64 {
    let [a, b, c, d] = words;
    let all = [band.index() as u64, a, b, c, d];
    XxHash3_64::oneshot_with_seed(content, all.map(u64::to_le_bytes).as_flattened())
}

pub(crate) fn to_words(hint: KeptHint, now: u64) -> HintWords {
    let owner = hint.owner.map_or(NOBODY, |owner| *owner.as_bytes());
    let (halves, _) = owner.as_chunks();
    let [low, high] = [halves[0], halves[1]].map(u64::from_le_bytes);
    [low, high, hint.ttl, now.saturating_add(hint.left)]
}

pub(crate) fn of_words([low, high, ttl, end]: HintWords, now: u64) -> KeptHint {
    let mut owner = NOBODY;
    owner.as_chunks_mut().0.copy_from_slice(&[low, high].map(u64::to_le_bytes));
    let left = if end == NEVER { NEVER } else { end.saturating_sub(now) };
    KeptHint {
        owner: (owner != NOBODY).then(|| Owner::from_bytes(owner)),
        ttl,
        left: left.min(ttl),
    }
}
