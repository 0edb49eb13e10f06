//! What the handles of a cache and its sequences share.

use super::Holding;
use super::ends::EndsByScope;
use crate::hash::{self, HashConfig, Scope};
use crate::id::BlockHash;
use crate::policy::NameBlocks;
use crate::shared_stack::SharedStack;
use crate::sync::{Arc, AtomicU64, OnceLock, Ordering};
use crate::weights::{CurrentWeights, Weights, WeightsName};

/// What the handles of a cache and its sequences share. Its address is the cache's identity.
#[derive(Debug)]
pub(crate) struct Home {
    pub(crate) config: HashConfig,
    pub(crate) weights: CurrentWeights,
    /// The oldest version whose content may be found.
    oldest: AtomicU64,
    /// What names blocks for the eviction policy, where it goes by names.
    pub(crate) pseudonyms: OnceLock<Arc<dyn NameBlocks>>,
    /// Tokens of the sequences that were committed.
    pub(crate) queries: AtomicU64,
    /// Tokens of them that were hits.
    pub(crate) hits: AtomicU64,
    /// What sequences held when they were dropped, until the next call that takes blocks or counts free ones.
    pub(crate) abandoned: SharedStack<Abandoned>,
    /// Where requests go on, for snapshots of states.
    pub(crate) ends: EndsByScope,
}

/// What a sequence held when it was dropped.
#[derive(Debug)]
pub(crate) struct Abandoned {
    pub(crate) holding: Holding,
    /// What the eviction policy calls the blocks.
    pub(crate) names: Vec<BlockHash>,
}

impl Home {
    pub(crate) fn new(config: HashConfig, weights: Option<WeightsName>) -> Self {
        Self {
            weights: CurrentWeights::new(weights, |name| root_of(&config, name)),
            config,
            oldest: AtomicU64::new(0),
            pseudonyms: OnceLock::new(),
            queries: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            abandoned: SharedStack::default(),
            ends: EndsByScope::default(),
        }
    }

    /// Changes the weights; their version.
    pub(crate) fn change_weights(&self, name: Option<WeightsName>) -> u64 {
        self.weights.change(name, |name| root_of(&self.config, name))
    }

    /// Content of versions before this one is findable no more.
    pub(crate) fn forget_before(&self, version: u64) {
        // Relaxed, here and below: it bounds what sequences look for; content of before is of an ended epoch.
        self.oldest.fetch_max(version, Ordering::Relaxed);
    }

    /// The weights of a version whose content may be found.
    pub(crate) fn weights_at(&self, version: u64) -> Option<&Weights> {
        let is_kept = version >= self.oldest.load(Ordering::Relaxed);
        is_kept.then(|| self.weights.at(version)).flatten()
    }

    /// Whether weights whose content may be found have, or had, this name.
    pub(crate) fn had(&self, name: &WeightsName) -> bool {
        let versions = self.oldest.load(Ordering::Relaxed)..=self.weights.version();
        let mut kept = versions.filter_map(|version| self.weights.at(version));
        kept.any(|weights| name.is(&weights.name))
    }
}

/// The root hash of a cache without a scope, under the weights of this name.
fn root_of(config: &HashConfig, weights: &str) -> BlockHash {
    hash::root(config, &Scope::default(), weights)
}
