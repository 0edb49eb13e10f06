//! The weights that hashes stand for: how often they were changed, and what they are called.

use std::borrow::Cow;
use std::sync::{Arc, PoisonError};

use crate::error::InvalidArgument;
use crate::sync::{AtomicU64, Ordering, RwLock};

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
                && kind
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
                && !rest.is_empty()
        });
        if is_name {
            return Ok(Self(name.into()));
        }
        let reason =
            format!(r#"must be a kind, a colon and a name, as "tag:step-1200", not {name:?}"#);
        Err(InvalidArgument::new("weights", reason))
    }
}

/// The weights at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Weights {
    /// Counts the changes.
    pub(crate) version: u64,
    name: Option<WeightsName>,
}

impl Weights {
    /// What the root of all hashes calls them.
    pub(crate) fn name(&self) -> Cow<'_, str> {
        match &self.name {
            Some(WeightsName(name)) => Cow::Borrowed(name),
            None => Cow::Owned(self.version.to_string()),
        }
    }
}

/// The weights of now; any thread may read and change them.
#[derive(Debug)]
pub(crate) struct CurrentWeights {
    /// That of `weights`, for those who ask for no more.
    version: AtomicU64,
    weights: RwLock<Weights>,
}

impl CurrentWeights {
    pub(crate) fn new(name: Option<WeightsName>) -> Self {
        Self {
            version: AtomicU64::new(0),
            weights: RwLock::new(Weights { version: 0, name }),
        }
    }

    /// Version and name that belong together.
    pub(crate) fn get(&self) -> Weights {
        // A poisoned lock would do no harm: nothing panics between the two changes below.
        let weights = self.weights.read().unwrap_or_else(PoisonError::into_inner);
        weights.clone()
    }

    /// The version alone, which takes no lock.
    pub(crate) fn version(&self) -> u64 {
        // Acquire: whoever sees a version finds its name, or that of a later one, in `weights`.
        self.version.load(Ordering::Acquire)
    }

    /// The next version, by this name.
    pub(crate) fn change(&self, name: Option<WeightsName>) -> u64 {
        let mut weights = self.weights.write().unwrap_or_else(PoisonError::into_inner);
        let version = weights.version + 1;
        *weights = Weights { version, name };
        // Release: pairs with the load above. The lock is still held, so that versions are told in
        // their order, and who sees this one waits for the name.
        self.version.store(version, Ordering::Release);
        version
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_its_kind() {
        for good in ["tag:x", "blake3:00", "a:b:c", "tag: ", "tag:\u{e4}"] {
            assert!(WeightsName::new(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "12",
            "tag",
            "tag:",
            ":x",
            "Tag:x",
            "3:x",
            "a b:x",
            "t\u{e4}g:x",
        ] {
            assert!(WeightsName::new(bad).is_err(), "{bad}");
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::check;

    fn named(version: u64) -> Option<WeightsName> {
        (version == 1).then(|| WeightsName::new("tag:one").unwrap())
    }

    /// A reader beside a change finds a version with its own name, never older than the version it saw.
    #[test]
    fn version_and_name_belong_together() {
        check(|| {
            let current = Arc::new(CurrentWeights::new(None));
            let changing = Arc::clone(&current);
            let writer = thread::spawn(move || {
                for version in 1..3 {
                    assert_eq!(changing.change(named(version)), version);
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
            assert_eq!(weights.name(), name);
            writer.join().unwrap();
            assert_eq!(current.get().name(), "2");
        });
    }
}
