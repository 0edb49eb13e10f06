//! What the constructors of pools and caches take, read from Python's words.

use prefixcache_core::error::Argument;
use prefixcache_core::groups::GroupSpec;
use prefixcache_core::policy::EvictionPolicy;
use prefixcache_core::store::{FreeOrder, PoolConfig};
use prefixcache_core::weights::WeightsName;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyString, PyTuple};

use crate::arguments::{Number, Value, Word, or, wrong_type};
use crate::errors::{Result, out_of_range};
use crate::names::{self, Name};

impl Word for FreeOrder {
    const ARGUMENT: &'static str = "free_order";
    const WORDS: &'static [(&'static str, Self)] =
        &[("unhashed_first", Self::UnhashedFirst), ("append", Self::Append)];
}

impl Word for EvictionPolicy {
    const ARGUMENT: &'static str = "eviction_policy";
    const WORDS: &'static [(&'static str, Self)] =
        &[("lru", Self::Lru), ("reuse-queue", Self::ReuseQueue)];
}

/// "full", ("sliding_window", window) or "state".
impl Value for GroupSpec {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let kinds = r#""full", ("sliding_window", window) or "state""#;
        let (name, window) = match value.cast::<PyTuple>() {
            Ok(pair) if pair.len() == 2 => (pair.get_item(0)?, Some(pair.get_item(1)?)),
            _ => (value.clone(), None),
        };
        let Ok(name) = name.cast::<PyString>() else {
            return Err(wrong_type(argument, kinds, value));
        };
        match (&*name.to_string_lossy(), window) {
            ("full", None) => Ok(Self::FullAttention),
            ("state", None) => Ok(Self::State),
            ("sliding_window", Some(window)) => {
                let window = usize::read(names::Window::NAME.into(), &window)?;
                Ok(Self::SlidingWindow { window })
            }
            (other, _) => {
                let reason = format!("must be {kinds}, not {other:?}");
                Err(out_of_range(argument, reason))
            }
        }
    }
}

/// A kind, a colon and a name.
impl Value for WeightsName {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        let Ok(name) = value.cast::<PyString>() else {
            return Err(wrong_type(argument, "a string", value));
        };
        Ok(Self::new(name.to_cow()?.as_ref())?)
    }
}

/// Bytes, of any length.
impl Value for Vec<u8> {
    fn read(argument: Argument, value: &Bound<'_, PyAny>) -> Result<Self> {
        PyBackedBytes::read(argument, value).map(|bytes| bytes.to_vec())
    }
}

/// The size and order of a pool, as its constructor's arguments say.
pub fn pool_config(
    num_blocks: Number<names::NumBlocks>,
    max_blocks: Option<Number<names::MaxBlocks>>,
    free_order: FreeOrder,
) -> PoolConfig {
    PoolConfig::new(num_blocks.0)
        .with_max_blocks(or(max_blocks, num_blocks.0))
        .with_free_order(free_order)
}
