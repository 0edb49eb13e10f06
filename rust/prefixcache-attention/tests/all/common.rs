//! Random sequences in a paged cache, and attention the slow and obvious way.

use prefixcache_attention::{Attention, BlockTables, KvElement, Plan, append, attend};
use prefixcache_cpu::{Form, Rows, RowsMut, Team};

use crate::noise::noise;

/// The queries, keys and values of one sequence: [tokens, heads * D] each.
pub struct Tokens<E> {
    pub queries: Vec<E>,
    pub keys: Vec<E>,
    pub values: Vec<E>,
}

impl<E: KvElement> Tokens<E> {
    pub fn random(seed: u64, count: usize, attention: &Attention) -> Self {
        let dims = attention.head_dim();
        Self {
            queries: noise(3 * seed, count * attention.heads() * dims),
            keys: noise(3 * seed + 1, count * attention.kv_heads() * dims),
            values: noise(3 * seed + 2, count * attention.kv_heads() * dims),
        }
    }
}

/// A step: for each sequence its number, the tokens it had, and those it has after the step.
pub type Step = Vec<(usize, usize, usize)>;

/// A model of one layer with its cache. Pages are handed out scattered; what was never written is
/// NaN, so that reading it shows.
pub struct Layer<'a, E> {
    pub attention: Attention,
    pub form: Form,
    pub team: &'a Team,
    pub block_size: usize,
    /// Whether steps list the pages alone that their queries see.
    pub leaves_out: bool,
    pub tables: Vec<Vec<i32>>,
    pub cache: Vec<E>,
}

const PAGES: usize = 256;

/// Numbers of another layer between the pages of this one.
const BETWEEN: usize = 16;

impl<'a, E: KvElement> Layer<'a, E> {
    pub fn new(attention: Attention, form: Form, team: &'a Team, block_size: usize) -> Self {
        let page_width = 2 * block_size * attention.kv_heads() * attention.head_dim();
        let cache = vec![E::from_f32(f32::NAN); PAGES * (BETWEEN + page_width)];
        Self {
            attention,
            form,
            team,
            block_size,
            leaves_out: false,
            tables: Vec::new(),
            cache,
        }
    }

    /// Computes a step; returns the output rows of its tokens, in order.
    pub fn step(&mut self, sequences: &[Tokens<E>], step: &Step) -> Vec<E> {
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let mut slots = Vec::new();
        let kv_width = self.attention.kv_heads() * self.attention.head_dim();
        let width = self.attention.heads() * self.attention.head_dim();
        let (mut qo_indptr, mut kv_indptr) = (vec![0], vec![0]);
        let (mut kv_indices, mut last_page_len) = (Vec::new(), Vec::new());
        let mut first_pages = Vec::new();
        for &(number, from, to) in step {
            self.grow(number, to);
            slots.extend((from..to).map(|position| self.slot(number, position)));
            queries.extend_from_slice(&sequences[number].queries[from * width..to * width]);
            keys.extend_from_slice(&sequences[number].keys[from * kv_width..to * kv_width]);
            values.extend_from_slice(&sequences[number].values[from * kv_width..to * kv_width]);
            let first_page = if self.leaves_out {
                self.num_dropped(from)
            } else {
                0
            };
            let pages = first_page..to.div_ceil(self.block_size);
            kv_indices.extend_from_slice(&self.tables[number][pages]);
            first_pages.push(first_page as i32);
            kv_indptr.push(kv_indices.len() as i32);
            qo_indptr.push(slots.len() as i32);
            last_page_len.push(((to - 1) % self.block_size + 1) as i32);
        }
        let tables = BlockTables {
            qo_indptr: &qo_indptr,
            kv_indptr: &kv_indptr,
            kv_indices: &kv_indices,
            last_page_len: &last_page_len,
            first_pages: self.leaves_out.then_some(&first_pages),
        };
        let plan =
            Plan::new(tables, PAGES, self.block_size, &self.attention).expect("a sound step");
        let page_width = BETWEEN + 2 * self.block_size * kv_width;
        let mut cache = RowsMut::new(&mut self.cache, page_width);
        let cache = cache.columns(BETWEEN..page_width);
        append(
            &cache,
            &plan,
            &slots,
            Rows::new(&keys, kv_width),
            Rows::new(&values, kv_width),
        );
        let mut out = vec![E::from_f32(f32::NAN); queries.len()];
        attend(
            self.form,
            self.team,
            &plan,
            Rows::new(&self.cache, page_width).columns(BETWEEN..page_width),
            Rows::new(&queries, width),
            sinks(&self.attention).as_deref(),
            &RowsMut::new(&mut out, width),
        )
        .expect("memory");
        out
    }

    /// Makes the pages behind the window of position `next` unreadable, as a cache may.
    pub fn give_away_behind_window(&mut self, number: usize, next: usize) {
        let dropped = self.num_dropped(next);
        for page in &mut self.tables[number][..dropped] {
            *page = 0;
        }
    }

    /// Pages behind the window of position `next`.
    fn num_dropped(&self, next: usize) -> usize {
        let left = self.attention.window_left;
        left.map_or(0, |left| next.saturating_sub(left) / self.block_size)
    }

    fn grow(&mut self, number: usize, tokens: usize) {
        self.tables
            .resize_with(self.tables.len().max(number + 1), Vec::new);
        while self.tables[number].len() * self.block_size < tokens {
            let used: usize = self.tables.iter().map(Vec::len).sum();
            assert!(used + 1 < PAGES);
            // 97 and 255 share no factor: each page once, far from its neighbour. Page 0 is none.
            self.tables[number].push((1 + used * 97 % (PAGES - 1)) as i32);
        }
    }

    fn slot(&self, number: usize, position: usize) -> i64 {
        let page = i64::from(self.tables[number][position / self.block_size]);
        page * self.block_size as i64 + (position % self.block_size) as i64
    }
}

/// The heads' sinks, of most numbers of heads.
pub fn sinks(attention: &Attention) -> Option<Vec<f32>> {
    let has_sinks = attention.heads() != 3;
    has_sinks.then(|| {
        noise::<f32>(7, attention.heads())
            .iter()
            .map(|sink| 4.0 * sink)
            .collect()
    })
}

/// Softmax attention of one query row over the whole sequence, in `f64`.
pub fn reference<E: KvElement>(
    attention: &Attention,
    tokens: &Tokens<E>,
    position: usize,
    head: usize,
) -> Vec<f64> {
    let (dims, kv_heads) = (attention.head_dim(), attention.kv_heads());
    let kv_head = head / (attention.heads() / kv_heads);
    let at = |numbers: &[E], row: usize, d: usize| f64::from(numbers[row * dims + d].to_f32());
    let query_row = position * attention.heads() + head;
    let first = attention
        .window_left
        .map_or(0, |left| position.saturating_sub(left));
    let score = |key: usize| {
        let row = key * kv_heads + kv_head;
        let dot: f64 = (0..dims)
            .map(|d| at(&tokens.queries, query_row, d) * at(&tokens.keys, row, d))
            .sum();
        let scaled = dot * f64::from(attention.scale);
        attention.softcap.map_or(scaled, |cap| {
            f64::from(cap) * (scaled / f64::from(cap)).tanh()
        })
    };
    let weights: Vec<f64> = (first..=position).map(|key| score(key).exp()).collect();
    let sink = sinks(attention).map_or(0.0, |sinks| f64::from(sinks[head]).exp());
    let total: f64 = weights.iter().sum::<f64>() + sink;
    let mean = |d: usize| {
        let weighted = weights.iter().zip(first..);
        weighted
            .map(|(w, key)| w * at(&tokens.values, key * kv_heads + kv_head, d))
            .sum::<f64>()
    };
    (0..dims).map(|d| mean(d) / total).collect()
}
