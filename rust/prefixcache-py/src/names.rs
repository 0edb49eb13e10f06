//! The names of the arguments, as types, so that an argument's type can name it in an error.

/// The name of an argument.
pub trait Name {
    const NAME: &'static str;
}

/// The letters of a type's name in snake case.
const fn snake<const LEN: usize>(name: &[u8]) -> [u8; LEN] {
    let (mut text, mut at, mut i) = ([b'_'; LEN], 0, 0);
    while i < name.len() {
        at += (i > 0 && name[i].is_ascii_uppercase()) as usize;
        text[at] = name[i].to_ascii_lowercase();
        (at, i) = (at + 1, i + 1);
    }
    text
}

const fn snake_len(name: &[u8]) -> usize {
    let (mut len, mut i) = (name.len(), 1);
    while i < name.len() {
        len += name[i].is_ascii_uppercase() as usize;
        i += 1;
    }
    len
}

/// Types whose names, in snake case, are those of the arguments, or which have another one.
macro_rules! names {
    (@text $name:ident $text:literal) => { $text };
    (@text $name:ident) => {{
        const LETTERS: &[u8] = stringify!($name).as_bytes();
        const TEXT: [u8; snake_len(LETTERS)] = snake(LETTERS);
        match str::from_utf8(&TEXT) {
            Ok(text) => text,
            Err(_) => panic!("names are ASCII"),
        }
    }};
    ($($name:ident $(= $text:literal)?),* $(,)?) => {
        $(
            #[derive(Clone, Copy)]
            pub struct $name;

            impl Name for $name {
                const NAME: &'static str = names!(@text $name $($text)?);
            }
        )*
    };
}

names! {
    Accepted, Address, Addresses, Affinity, AgeBounds, Alike, Allowed, Answer, Attentions, BadWords, Balance,
    Banned, Bias, BiasTokens, BlockBytes, BlockHash, BlockSize, BlockTokens, Blocks, Cache, Caches, Cap,
    Capacity, Cells, Chain, Chunk, Conv, ConvBias, Cos, Count, Counts, Decay, DenseNorm, DenseOutNorm, Descriptor,
    Digest, DiskBlocks, Eps, Era, ExpertScales, ExpertsNorm, ExpertsOutNorm, Extras, FeedForward, FirstPages, Frequency,
    GapBounds, Groups, Guesses, Half, Hashes, HeadDim, Hidden, Hints, HitTokens, Ids, Index, Indices, Indptr,
    InputNorm, Inputs, Instructions, Interval, KeptTokens, KeyDim, KeyHeads, Key, KeyStride, Keys, KvIndices,
    KvIndptr, LastPageLen, LayerGroups, Layers, Length, Loads, Logits, Logprobs, Mask, MaxBlocks, MaxCachedBlocks,
    MaxDelayMs, MaxEvictions, MaxMoves, MaxNumbers, MaxOthers, MaxTokens, MinP, MinPinBlocks, MinUses, Mixer, MixerOutNorm,
    MlpNorm, MlpOutNorm, Most, MsPerRequest, MsPerToken, Norm, NormOffset, NumBlocks, NumBytes, NumGroups,
    NumHeads, NumKvHeads, NumNew, NumPages, NumTensors, NumTokens, ObjectiveMs, Offset, Out, Outputs,
    OverlapWeight, OwnInputs, PageStride, Parts, Position, Presence, Prompt, PromptTokens, QkNorm, QoIndptr,
    Queries, QueryRope, QueryStride, Ranges, Renormalise, Repetition, Replica, RequestTokens, Residual,
    RetentionBudget, Rope, Rotated, Rotations, RouterNorm, Scale, Seconds, Seed, SelectionBias, Sequences, Sin,
    Sinks, Sizes, Skip, SlotMapping, SnapshotBlocks, Softcap, Start, Starts, State, States, Stop, Stops,
    StreamScale, Taps, Temperature, TimeBias, TokenIds, Tokens, TopK, TopP, Upto, ValueDim, ValueHeads,
    ValueNorm, ValueStride, Values, Version, Weight, WeightWidth, Weights, Width, Window, WindowLeft,
    WindowTokens, X, XStride, EpochBefore = "epoch", FirstBlock = "first", GroupIndex = "group", GroupWidth = "group",
    OldMaxEvictions = "max_losses", RowCount = "rows", SampledRows = "rows", TensorIndex = "tensor", ThreadCount = "threads",
}
