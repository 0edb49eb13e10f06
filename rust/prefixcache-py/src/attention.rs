//! The Python class `PagedAttention`.

use prefixcache_attention::{
    Attention, BlockTables, CODE_TOKENS, KvElement, KvPagesMut, Plan, attend,
};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arguments::{Array, Number, OneOf, Real};
use crate::cpu::{Cpu, DType, Matrix, with_dtype};
use crate::errors::{Result, ensure, out_of_range};
use crate::exclusive::{Exclusive, Using};
use crate::names;

/// Attention over paged keys and values, on the CPU.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct PagedAttention {
    cpu: Py<Cpu>,
    pub dtype: DType,
    /// Whether keys and values are kept as codes of eight bits.
    keeps_codes: bool,
    pub attention: Attention,
    step: Exclusive<Option<PlannedStep>>,
}

/// A planned step: where its tokens stand, and where their keys and values go.
pub struct PlannedStep {
    pub plan: Plan,
    pub slots: Vec<i64>,
}

fn checked_slots(slots: &[i64], limit: usize) -> Result<Vec<i64>> {
    let most = limit.saturating_sub(1);
    for &slot in slots {
        let is_inside = usize::try_from(slot).is_ok_and(|slot| slot < limit);
        ensure!(is_inside, "slot_mapping", "must be from 0 to {most}, not {slot}");
    }
    Ok(slots.to_vec())
}

fn check_num_queries(qo_indptr: &[i32], num_slots: usize) -> Result<()> {
    if let Some(&queries) = qo_indptr.last() {
        let same = usize::try_from(queries) == Ok(num_slots);
        ensure!(same, "slot_mapping", "must have {queries} slots, one a query, not {num_slots}");
    }
    Ok(())
}

impl PagedAttention {
    /// The planned step, for one call.
    pub fn planned(&self) -> Result<Using<'_, Option<PlannedStep>>> {
        self.step.use_as("the attention")
    }

    pub fn of_step(planned: &Option<PlannedStep>) -> Result<&PlannedStep> {
        let nothing = || PyRuntimeError::new_err("no step is planned");
        Ok(planned.as_ref().ok_or_else(nothing)?)
    }

    /// Slots of a cache of `num_pages` pages, whose keys and values must fit into memory.
    fn num_slots(&self, num_pages: usize, block_size: usize) -> Result<usize> {
        let dims = self.attention.kv_heads() * self.attention.head_dim();
        let slots = num_pages.checked_mul(block_size);
        let bytes = slots.and_then(|slots| slots.checked_mul(2 * dims * size_of::<f32>()));
        let fits = bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok());
        slots.filter(|_| fits).ok_or_else(|| {
            let reason = format!("times block_size ({block_size}) is more than memory has");
            out_of_range("num_pages", reason)
        })
    }

    /// What a page that holds a layer's keys and values has as many bytes as: numbers of the type.
    pub fn page_numbers(&self, step: &PlannedStep) -> usize {
        match self.keeps_codes {
            true => self.attention.code_bytes(step.plan.block_size()) / self.dtype.size(),
            false => {
                2 * self.attention.kv_heads() * step.plan.block_size() * self.attention.head_dim()
            }
        }
    }

    /// The pages of a layer.
    ///
    /// # Safety
    /// Numbers of type E, or codes, stand there while `'a` lasts, and nobody else uses them.
    pub unsafe fn pages<'a, E: KvElement>(&self, cache: &Matrix) -> Result<KvPagesMut<'a, E>> {
        // SAFETY: the caller's promise.
        Ok(unsafe {
            match self.keeps_codes {
                true => KvPagesMut::Codes(cache.in_bytes(self.dtype).rows_mut()?),
                false => KvPagesMut::Numbers(cache.rows_mut()?),
            }
        })
    }

    /// A part of each page at an address, of `numbers` float32 numbers of a state.
    pub fn state_parts(
        &self,
        step: &PlannedStep,
        address: Number<names::States>,
        numbers: usize,
    ) -> Matrix {
        let stride = self.page_numbers(step) * self.dtype.size() / size_of::<f32>();
        Matrix::strided(address, (step.plan.num_pages(), numbers), stride)
    }
}

#[pymethods]
impl PagedAttention {
    /// Attention of `num_heads` query heads over `num_kv_heads` heads of the cache.
    #[new]
    #[pyo3(signature = (
        cpu, dtype, num_heads, num_kv_heads, head_dim, scale, *, window_left=None, softcap=None,
        keeps_codes=false
    ))]
    fn new(
        cpu: Py<Cpu>,
        dtype: OneOf<DType>,
        num_heads: Number<names::NumHeads>,
        num_kv_heads: Number<names::NumKvHeads>,
        head_dim: Number<names::HeadDim>,
        scale: Real<names::Scale>,
        window_left: Option<Number<names::WindowLeft>>,
        softcap: Option<Real<names::Softcap>>,
        keeps_codes: bool,
    ) -> Result<Self> {
        let mut attention = Attention::new(num_heads.0, num_kv_heads.0, head_dim.0, scale.0)?;
        attention.window_left = window_left.map(|left| left.0);
        attention.softcap = softcap.map(|cap| cap.0);
        let step = Exclusive::new(None);
        Ok(Self { cpu, dtype: dtype.0, keeps_codes, attention, step })
    }

    /// Take the block tables of a step over a cache [num_pages, 2, K, block_size, D].
    #[pyo3(signature = (
        num_pages, block_size, qo_indptr, kv_indptr, kv_indices, last_page_len, slot_mapping,
        first_pages=None
    ))]
    fn plan(
        &self,
        num_pages: Number<names::NumPages>,
        block_size: Number<names::BlockSize>,
        qo_indptr: Array<'_, names::QoIndptr, i32>,
        kv_indptr: Array<'_, names::KvIndptr, i32>,
        kv_indices: Array<'_, names::KvIndices, i32>,
        last_page_len: Array<'_, names::LastPageLen, i32>,
        slot_mapping: Array<'_, names::SlotMapping, i64>,
        first_pages: Option<Array<'_, names::FirstPages, i32>>,
    ) -> Result<()> {
        let (num_pages, block_size) = (num_pages.0, block_size.0);
        ensure!(block_size > 0, "block_size", "must be positive");
        let are_groups = !self.keeps_codes || block_size.is_multiple_of(CODE_TOKENS);
        ensure!(
            are_groups,
            "block_size",
            "must be a multiple of {CODE_TOKENS} where codes are kept"
        );
        let num_slots = self.num_slots(num_pages, block_size)?;
        // Attached to the interpreter until they are read: nobody's code runs that could resize them.
        let (qo_indptr, kv_indptr) = (qo_indptr.read()?, kv_indptr.read()?);
        let (kv_indices, last_page_len) = (kv_indices.read()?, last_page_len.read()?);
        let slot_mapping = slot_mapping.read()?;
        let first_pages = first_pages.as_ref().map(Array::read).transpose()?;
        let tables = BlockTables {
            qo_indptr: qo_indptr.slice()?,
            kv_indptr: kv_indptr.slice()?,
            kv_indices: kv_indices.slice()?,
            last_page_len: last_page_len.slice()?,
            first_pages: first_pages.as_ref().map(|pages| pages.slice()).transpose()?,
        };
        let slots = checked_slots(slot_mapping.slice()?, num_slots)?;
        // Before the plan, which takes memory for each query.
        check_num_queries(tables.qo_indptr, slots.len())?;
        let plan = Plan::new(tables, num_pages, block_size, &self.attention)?;
        *self.planned()? = Some(PlannedStep { plan, slots });
        Ok(())
    }

    /// Write the step's keys and values to their slots in `cache`, then attend; to `out`, dense.
    fn run(
        &self,
        py: Python<'_>,
        cache: Number<names::Cache>,
        queries: Number<names::Queries>,
        query_stride: Number<names::QueryStride>,
        keys: Number<names::Keys>,
        key_stride: Number<names::KeyStride>,
        values: Number<names::Values>,
        value_stride: Number<names::ValueStride>,
        out: Number<names::Out>,
    ) -> Result<()> {
        let step = self.planned()?;
        let step = Self::of_step(&step)?;
        let (rows, dims) = (step.plan.num_queries(), self.attention.head_dim());
        let (width, kv_width) = (self.attention.heads() * dims, self.attention.kv_heads() * dims);
        let cache = Matrix::dense(cache, step.plan.num_pages(), self.page_numbers(step));
        let queries = Matrix::strided(queries, (rows, width), query_stride.0);
        let keys = Matrix::strided(keys, (rows, kv_width), key_stride.0);
        let values = Matrix::strided(values, (rows, kv_width), value_stride.0);
        let out = Matrix::dense(out, rows, width);
        let (cpu, PlannedStep { plan, slots }) = (self.cpu.get(), step);
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        // The cache is written first, and then only read.
        py.detach(|| unsafe {
            with_dtype!(self.dtype, E => {
                let (form, team, mut cache) = (cpu.form, &cpu.team, self.pages::<E>(&cache)?);
                cache.append(form, team, plan, slots, keys.rows()?, values.rows()?);
                attend(form, team, plan, cache.read(), queries.rows()?, None, &out.rows_mut()?)?;
            });
            Ok(())
        })
    }
}
