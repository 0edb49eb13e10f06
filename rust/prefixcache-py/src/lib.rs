//! The Python module `prefixcache._core`: translate arguments, call the core, map errors.
//!
//! What a call takes, in which units and shapes, and what it raises is said in `_core.pyi`.
//!
//! Nothing is decided here. Arguments are checked once, with an error that names the argument; no
//! call panics, and none waits for another: what is in use by another thread raises. Only calls about
//! replicas (`routing.rs`) wait for each other, for microseconds and detached from the interpreter.
#![warn(missing_docs)]
#![expect(
    clippy::too_many_arguments,
    reason = "a method has the arguments of its Python signature"
)]

mod arguments;
mod attention;
mod block_hashes;
mod block_pool;
mod cpu;
mod decoder;
mod delta;
mod detach;
mod dicts;
mod digests;
mod drafts;
mod errors;
mod events;
mod evictions;
mod exclusive;
mod hints;
mod json;
mod kv_file;
mod layer;
mod linear;
mod names;
mod parts;
mod prefix_cache;
mod recording;
mod replay;
mod routing;
mod rowwise;
mod sampler;
mod sequence;
mod shared_cache;
mod staging;
mod stop_strings;
mod tokens;
mod writer;

use pyo3::prelude::*;

/// The Rust core: block pool, prefix index, block tables, and the CPU's kernels.
///
/// Nothing relies on the interpreter's lock: the classes are for many threads, or say which one they
/// are lent to. What numpy asks for holds here too: an array that a call reads or writes is not
/// resized by another thread meanwhile.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use crate::{
        attention::PagedAttention,
        block_hashes::BlockHashes,
        block_pool::BlockPool,
        cpu::Cpu,
        decoder::DecoderStack,
        delta::DeltaMixer,
        digests::{derive_digest, hash_file_ranges},
        drafts::{DraftIndex, DraftStream},
        events::EventSnapshot,
        json::parse_json,
        kv_file::{KVFile, describe_kv_file},
        layer::{
            AttentionMixer, DecoderLayer, DenseAndExperts, DenseFeedForward, ExpertsFeedForward,
            OwnInput, ShortConvMixer,
        },
        linear::{LaidOutFile, PackedLinear},
        prefix_cache::PrefixCache,
        recording::{BlockPseudonyms, replay_recording},
        replay::{TraceReader, TraceReplay},
        routing::{ReplicaChooser, ReplicaIndex},
        rowwise::RowOps,
        sampler::{Sampler, SamplerRow},
        sequence::Sequence,
        staging::BlockStaging,
        stop_strings::{StopStream, StopStrings},
    };
}
