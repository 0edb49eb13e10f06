//! The weights that hashes stand for: how often they were changed, and what they are called.

use crate::error::{InvalidArgument, require};
use crate::id::BlockHash;
use crate::sync::{Arc, AtomicU64, OnceLock, Ordering};

use Ordering::{AcqRel, Acquire};

/// What the weights are called, whatever happened before: equal names are equal weights.
///
/// It begins with its kind and a colon, as `tag:step-1200` does, so it is never taken for the number of a
/// version, which names weights that have no other name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightsName(Arc<str>);

impl WeightsName {
    /// Fails unless the name is a kind (lower-case ASCII letters and digits, a letter first), a colon
    /// and something behind it.
    pub fn new(name: &str) -> Result<Self, InvalidArgument> {
        let is_name = name.split_once(':').is_some_and(|(kind, rest)| {
            kind.starts_with(|first: char| first.is_ascii_lowercase())
                && kind.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
                && !rest.is_empty()
        });
        require(is_name, "weights", || {
            format!(r#"must be a kind, a colon and a name, as "tag:step-1200", not {name:?}"#)
        })?;
        Ok(Self(name.into()))
    }

    /// Whether hashes call weights by it.
    pub(crate) fn is(&self, name: &str) -> bool {
        &*self.0 == name
    }

    /// Whether it stands for what the weights are, so that another process gives it to no others: a digest of
    /// them, whatever they were quantized to.
    #[must_use]
    pub fn is_of_content(&self) -> bool {
        is_of_content(&self.0)
    }
}

/// [`WeightsName::is_of_content`], for the name that hashes have.
pub(crate) fn is_of_content(name: &str) -> bool {
    let quantized = name.strip_prefix("quantized:").and_then(|rest| rest.split_once(':'));
    let name = quantized.map_or(name, |(_, name)| name);
    name.starts_with("blake3:")
}

/// The weights at one moment.
#[derive(Debug)]
pub(crate) struct Weights {
    /// Counts the changes.
    pub(crate) version: u64,
    /// What the root of all hashes calls them.
    pub(crate) name: String,
    /// The hash before the first block of a prompt without a scope.
    pub(crate) root: BlockHash,
}

/// Segments of versions: the k-th has 2^k, so that no array grows and a million changes take twenty allocations.
const SEGMENTS: usize = 48;

/// The weights of now; any thread may read and change them, and readers wait for nobody.
///
/// Each version has a slot, which is written once and stays: 64 bytes and a name for each change of the weights.
#[derive(Debug)]
pub(crate) struct CurrentWeights {
    version: AtomicU64,
    segments: [OnceLock<Box<[OnceLock<Weights>]>>; SEGMENTS],
}

impl CurrentWeights {
    /// Version 0, by this name; `root_of` gives the root hash under weights of a name.
    pub(crate) fn new(name: Option<WeightsName>, root_of: impl Fn(&str) -> BlockHash) -> Self {
        let new =
            Self { version: AtomicU64::new(0), segments: std::array::from_fn(|_| OnceLock::new()) };
        let _ = new.slot(0).set(named(0, name, root_of));
        new
    }

    fn slot(&self, version: u64) -> &OnceLock<Weights> {
        let place = version + 1;
        let segment = place.ilog2();
        let slots = self.segments[segment as usize]
            .get_or_init(|| (0..1u64 << segment).map(|_| OnceLock::new()).collect());
        &slots[(place - (1 << segment)) as usize]
    }

    /// Version, name and root that belong together.
    pub(crate) fn get(&self) -> &Weights {
        let weights = self.slot(self.version()).get();
        weights.expect("a version is published after its slot was written")
    }

    /// Those of a version that has been.
    pub(crate) fn at(&self, version: u64) -> Option<&Weights> {
        let has_been = version <= self.version();
        has_been.then(|| self.slot(version).get()).flatten()
    }

    /// The version alone.
    pub(crate) fn version(&self) -> u64 {
        // Acquire: whoever sees a version finds its slot written.
        self.version.load(Acquire)
    }

    /// The next version, by this name.
    pub(crate) fn change(
        &self,
        name: Option<WeightsName>,
        root_of: impl Fn(&str) -> BlockHash,
    ) -> u64 {
        loop {
            let before = self.version();
            let new = named(before + 1, name.clone(), &root_of);
            let is_own = self.slot(before + 1).set(new).is_ok();
            // AcqRel: pairs with the load above, for the slot that is written. Whoever finds another thread's slot
            // tells its version too, so that nobody waits for that thread.
            let _ = self.version.compare_exchange(before, before + 1, AcqRel, Acquire);
            if is_own {
                return before + 1;
            }
        }
    }
}

fn named(version: u64, name: Option<WeightsName>, root_of: impl Fn(&str) -> BlockHash) -> Weights {
    let name = name.map_or_else(|| version.to_string(), |WeightsName(name)| name.to_string());
    Weights { version, root: root_of(&name), name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_its_kind() {
        for good in ["tag:x", "blake3:00", "a:b:c", "tag: ", "tag:\u{e4}"] {
            assert!(WeightsName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "12", "tag", "tag:", ":x", "Tag:x", "3:x", "a b:x", "t\u{e4}g:x"] {
            assert!(WeightsName::new(bad).is_err(), "{bad}");
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;

    use super::*;
    use crate::sync::{check, in_parallel};

    fn root_of(name: &str) -> BlockHash {
        let mut bytes = [0; 32];
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        BlockHash::from_bytes(bytes)
    }

    fn tagged(version: u64) -> Option<WeightsName> {
        (version == 1).then(|| WeightsName::new("tag:one").unwrap())
    }

    /// A reader during a change finds a version with its own name, never older than the version it saw.
    #[test]
    fn version_and_name_belong_together() {
        check(|| {
            let current = Arc::new(CurrentWeights::new(None, root_of));
            let writer = in_parallel(&current, |current| {
                for version in 1..3 {
                    assert_eq!(current.change(tagged(version), root_of), version);
                }
            });
            let seen = current.version();
            let weights = current.get();
            assert!(weights.version >= seen);
            let name = if weights.version == 1 {
                "tag:one".to_owned()
            } else {
                weights.version.to_string()
            };
            assert_eq!((&weights.name, weights.root), (&name, root_of(&name)));
            writer.join().unwrap();
            assert_eq!(current.get().name, "2");
        });
    }

    /// Of two changes at once each has a version of its own, and the last one seen is of the later.
    #[test]
    fn changes_at_once_have_versions_of_their_own() {
        check(|| {
            let current = Arc::new(CurrentWeights::new(None, root_of));
            let thread = in_parallel(&current, |current| current.change(tagged(1), root_of));
            let one = current.change(None, root_of);
            let two = thread.join().unwrap();
            assert_eq!(one + two, 3);
            assert_eq!(current.version(), 2);
            assert_eq!(current.get().version, 2);
        });
    }
}
