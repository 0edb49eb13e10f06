//! What a row of logits is sampled with.

/// The options of one row. By default it takes the likeliest token of its logits as they are.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// How a token is drawn; None takes the likeliest one.
    pub draw: Option<Draw>,
    /// What is added to the logits of tokens.
    pub bias: Vec<(usize, f32)>,
    /// Tokens that may not be chosen.
    pub banned: Vec<usize>,
    /// The tokens that alone may be chosen.
    pub allowed: Option<Vec<usize>>,
    /// Penalties on tokens that stand in the sequence.
    pub penalties: Option<Penalties>,
    /// Tokens that would end a bad word: chosen only where no other may be.
    pub bad_words: Vec<usize>,
    /// One bit a token, bit i of word w that of token 32 w + i: those without may not be chosen.
    pub mask: Option<Vec<i32>>,
    /// How many of the likeliest tokens come with the log probability of the token that is chosen.
    pub logprobs: Option<usize>,
}

/// How a token is drawn: min_p, then top_k, then top_p of the remaining mass. Ties at a cut are kept.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// What logits are divided by; positive.
    pub temperature: f32,
    /// The least probability to be drawn, over that of the likeliest token: 0 or more.
    pub min_p: f64,
    /// How many of the likeliest tokens are kept; 0 keeps all.
    pub top_k: usize,
    /// The share of the mass that is kept, from the likeliest token on; 1 keeps all.
    pub top_p: f64,
    /// With `position`, what the noise is made from.
    pub seed: u64,
    /// The position of the token that is drawn.
    pub position: u64,
}

/// The CTRL paper's repetition penalty (Keskar et al., 2019), its sign mended; then OpenAI's.
///
/// The first is on tokens of prompt and answer; the others are on each token of the answer, once, and
/// once for each occurrence.
#[derive(Clone, Debug)]
pub struct Penalties {
    /// What a positive logit is divided by, and another one multiplied by; 1 changes nothing.
    pub repetition: f32,
    /// Subtracted where a token stands in the answer.
    pub presence: f32,
    /// Subtracted for each time that a token stands in the answer.
    pub frequency: f32,
    /// Tokens of the prompt.
    pub prompt: Vec<i32>,
    /// Tokens of the answer.
    pub answer: Vec<i32>,
}

impl Penalties {
    /// Whether any of them changes a logit.
    pub fn change(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }
}

/// Rows that cannot be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// A token that the vocabulary does not have.
    #[error("the vocabulary has {vocab_size} tokens, {field} of row {row} has the token {token}")]
    Token {
        /// The row.
        row: usize,
        /// The option that names it.
        field: &'static str,
        /// The token.
        token: i64,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// A mask that is too short.
    #[error("the mask of row {row} has no bit for each of {vocab_size} tokens")]
    Mask {
        /// The row.
        row: usize,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
    /// A vocabulary that is empty or too large.
    #[error("the vocabulary has {0} tokens, which must be from 1 to {MAX_VOCAB_SIZE}")]
    Vocabulary(usize),
    /// More or fewer rows of options than of logits.
    #[error("{logits} rows of logits and {rows} of options differ in number")]
    Count {
        /// Rows of logits.
        logits: usize,
        /// Rows of options.
        rows: usize,
    },
}

/// The largest vocabulary whose masses can be added.
pub const MAX_VOCAB_SIZE: usize = 1 << 19;

impl Row {
    /// Whether the logits are changed before a token is chosen.
    pub fn adjusts(&self) -> bool {
        !self.bias.is_empty()
            || !self.banned.is_empty()
            || self.allowed.is_some()
            || self.penalties.is_some()
            || !self.bad_words.is_empty()
            || self.mask.is_some()
    }

    /// Fails where the row, number `row`, names what the vocabulary does not have.
    pub(crate) fn check(&self, row: usize, vocab_size: usize) -> Result<(), RowError> {
        let check = |field, tokens: &mut dyn Iterator<Item = usize>| match tokens.max() {
            Some(token) if token >= vocab_size => {
                Err(RowError::Token { row, field, token: token as i64, vocab_size })
            }
            _ => Ok(()),
        };
        check("bias", &mut self.bias.iter().map(|&(token, _)| token))?;
        check("banned", &mut self.banned.iter().copied())?;
        check("allowed", &mut self.allowed.iter().flatten().copied())?;
        check("bad_words", &mut self.bad_words.iter().copied())?;
        if let Some(Penalties { prompt, answer, .. }) = &self.penalties {
            check_all("prompt", row, prompt, vocab_size)?;
            check_all("answer", row, answer, vocab_size)?;
        }
        let bits = self.mask.as_ref().map(|words| 32 * words.len());
        match bits.is_some_and(|bits| bits < vocab_size) {
            true => Err(RowError::Mask { row, vocab_size }),
            false => Ok(()),
        }
    }
}

/// Of a whole sequence: one look at all of its tokens.
pub(crate) fn check_all(
    field: &'static str,
    row: usize,
    tokens: &[i32],
    vocab_size: usize,
) -> Result<(), RowError> {
    // A negative one is the largest of all.
    let most = tokens.iter().fold(0, |most, &token| most.max(token as u32));
    match most as usize >= vocab_size && !tokens.is_empty() {
        true => Err(RowError::Token { row, field, token: i64::from(most as i32), vocab_size }),
        false => Ok(()),
    }
}
