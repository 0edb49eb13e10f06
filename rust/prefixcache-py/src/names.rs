//! The names of the arguments, as types, so that an argument's type can name it in an error.

/// The name of an argument.
pub trait Name {
    const NAME: &'static str;
}

macro_rules! names {
    ($($name:ident = $text:literal),* $(,)?) => {
        $(
            pub struct $name;

            impl Name for $name {
                const NAME: &'static str = $text;
            }
        )*
    };
}

names! {
    Address = "address",
    AttentionOutNorm = "attention_out_norm",
    Attentions = "attentions",
    Block = "block",
    BlockHash = "block_hash",
    BlockSize = "block_size",
    Blocks = "blocks",
    Cache = "cache",
    Caches = "caches",
    Cos = "cos",
    Count = "count",
    Counts = "counts",
    EpochBefore = "epoch",
    Chunk = "chunk",
    Eps = "eps",
    Extras = "extras",
    Groups = "groups",
    GroupIndex = "group",
    GroupWidth = "group",
    FirstPages = "first_pages",
    Half = "half",
    Hashes = "hashes",
    HeadDim = "head_dim",
    Hidden = "hidden",
    HitTokens = "hit_tokens",
    Index = "index",
    Indices = "indices",
    Indptr = "indptr",
    InputNorm = "input_norm",
    Inputs = "inputs",
    Instructions = "instructions",
    Interval = "interval",
    Keys = "keys",
    KeyStride = "key_stride",
    KvIndices = "kv_indices",
    KvIndptr = "kv_indptr",
    LastPageLen = "last_page_len",
    LayerGroups = "layer_groups",
    Layers = "layers",
    MaxBlocks = "max_blocks",
    MaxNumbers = "max_numbers",
    MaxTokens = "max_tokens",
    MaxOthers = "max_others",
    MinPinBlocks = "min_pin_blocks",
    MlpNorm = "mlp_norm",
    MlpOutNorm = "mlp_out_norm",
    NormOffset = "norm_offset",
    NumBlocks = "num_blocks",
    NumGroups = "num_groups",
    NumHeads = "num_heads",
    NumKvHeads = "num_kv_heads",
    NumNew = "num_new",
    NumPages = "num_pages",
    NumTokens = "num_tokens",
    Offset = "offset",
    Out = "out",
    Outputs = "outputs",
    Position = "position",
    QkNorm = "qk_norm",
    QoIndptr = "qo_indptr",
    Queries = "queries",
    QueryStride = "query_stride",
    Residual = "residual",
    Rope = "rope",
    Rotations = "rotations",
    RowCount = "rows",
    Scale = "scale",
    Sin = "sin",
    Sequences = "sequences",
    SlotMapping = "slot_mapping",
    Softcap = "softcap",
    Start = "start",
    Starts = "starts",
    Stop = "stop",
    Stops = "stops",
    ThreadCount = "threads",
    Tokens = "tokens",
    Upto = "upto",
    Values = "values",
    ValueStride = "value_stride",
    Weight = "weight",
    WeightWidth = "weight_width",
    Width = "width",
    Window = "window",
    WindowLeft = "window_left",
    X = "x",
    XStride = "x_stride",
}
