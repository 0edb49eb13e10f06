//! The Python class `PackedLinear`.

use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use prefixcache_core::error::Argument;
use prefixcache_cpu::{Bf16, Element, MappedWords};
use prefixcache_file::duplicate;
use prefixcache_ops as ops;
use prefixcache_ops::{Activations, BlocksError, Format};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arguments::{Number, Numbers, OneOf, Word};
use crate::cpu::{Cpu, DType, Matrix};
use crate::detach::run_on_numbers;
use crate::errors::{Failure, Result, ensure, out_of_range};
use crate::exclusive::unusable;
use crate::names;

type Start = Number<names::Start>;
type Address = Number<names::Address>;
type RowCount = Number<names::RowCount>;
type Count = Number<names::Count>;

/// A linear layer, its weight packed for the kernels of the CPU.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct PackedLinear {
    cpu: Py<Cpu>,
    pub dtype: DType,
    layer: RwLock<Layer>,
    /// The outputs of each part.
    parts: Vec<usize>,
    pub inputs: usize,
    pub outputs: usize,
}

pub enum Layer {
    Bf16(ops::PackedLinear<Bf16>),
    F32(ops::PackedLinear<f32>),
}

/// Evaluates an expression with `$layer` as the layer of whichever type.
macro_rules! with_layer {
    ($of:expr, $layer:ident => $body:expr) => {
        match $of {
            Layer::Bf16($layer) => $body,
            Layer::F32($layer) => $body,
        }
    };
}

/// The format of blocks.
impl Word for Format {
    const ARGUMENT: &'static str = "format";
    const WORDS: &'static [(&'static str, Self)] = &{
        let mut words = [("", Self::Q4_0); Self::ALL.len()];
        let mut i = 0;
        while i < words.len() {
            words[i] = (Self::ALL[i].name(), Self::ALL[i]);
            i += 1;
        }
        words
    };
}

impl Word for Activations {
    const ARGUMENT: &'static str = "activations";
    const WORDS: &'static [(&'static str, Self)] = &[("exact", Self::Exact), ("int8", Self::Int8)];
}

impl From<BlocksError> for Failure {
    fn from(error: BlocksError) -> Self {
        match error {
            BlocksError::OutOfMemory(error) => error.into(),
            invalid => PyValueError::new_err(invalid.to_string()).into(),
        }
    }
}

/// A number type of layers.
pub trait LayerElement: Element {
    /// The layer, if it is of this type.
    fn of(layer: &Layer) -> Option<&ops::PackedLinear<Self>>;
}

macro_rules! layer_elements {
    ($($element:ty => $of:ident;)+) => {
        $(impl LayerElement for $element {
            fn of(layer: &Layer) -> Option<&ops::PackedLinear<Self>> {
                if let Layer::$of(layer) = layer { Some(layer) } else { None }
            }
        })+
    };
}

layer_elements! {
    Bf16 => Bf16;
    f32 => F32;
}

impl PackedLinear {
    pub fn read(&self) -> Result<RwLockReadGuard<'_, Layer>> {
        self.layer.try_read().map_err(|error| unusable(error, "the layer"))
    }

    /// Whether the parts are those of `count` equal layers of `outputs` outputs, one after the other.
    pub fn has_parts_of(&self, count: usize, outputs: usize) -> bool {
        let each = self.parts.len() / count.max(1);
        let is_one = |parts: &[usize]| parts.iter().sum::<usize>() == outputs;
        self.parts.len().is_multiple_of(count) && each > 0 && self.parts.chunks(each).all(is_one)
    }

    fn write(&self) -> Result<RwLockWriteGuard<'_, Layer>> {
        self.layer.try_write().map_err(|error| unusable(error, "the layer"))
    }

    /// The ids at an address, each that of a row.
    ///
    /// # Safety
    /// Such ids stand there.
    unsafe fn checked_ids(&self, ids: Matrix) -> Result<Vec<usize>> {
        // SAFETY: the caller's promise.
        let ids = unsafe { ids.rows::<i64>()? }.row(0);
        let row = |(index, id): (usize, &i64)| match usize::try_from(*id) {
            Ok(row) if row < self.outputs => Ok(row),
            _ => {
                let reason = format!("must be from 0 to {}, not {id}", self.outputs - 1);
                Err(out_of_range(Argument::element("ids", index), reason))
            }
        };
        ids.iter().enumerate().map(row).collect()
    }

    /// The number of the part whose first output is `start`.
    fn part_at(&self, start: usize) -> Result<usize> {
        let mut first = 0;
        let begins_there = |outputs: &usize| {
            let begin = first;
            first += outputs;
            begin == start
        };
        let found = self.parts.iter().position(begins_there);
        found.ok_or_else(|| out_of_range("start", "must be the first output of a part"))
    }

    fn check_outputs(&self, start: usize, count: usize) -> Result<()> {
        let end = start.checked_add(count);
        let fits = end.is_some_and(|end| end <= self.outputs);
        ensure!(fits, "start", "must leave room for {count} of {} outputs", self.outputs);
        Ok(())
    }
}

/// # Safety
/// The addresses are those of numbers of these types, as `forward` demands.
unsafe fn run_product<E: Element, O: Element>(
    layer: &ops::PackedLinear<E>,
    cpu: &Cpu,
    (x, residual, out): (Matrix, Option<Matrix>, Matrix),
) -> Result<()> {
    // SAFETY: the caller's promise.
    let (x, residual, out) = unsafe {
        let residual = residual.map(|residual| residual.rows()).transpose()?;
        (x.rows()?, residual, out.rows_mut::<O>()?)
    };
    Ok(layer.forward(cpu.form, &cpu.team, x, residual, &out)?)
}

/// A file of laid-out parts, mapped to be read.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct LaidOutFile(MappedWords);

#[pymethods]
impl LaidOutFile {
    /// Maps the file of a descriptor, which nobody writes to or cuts short any more. Raises OSError.
    #[new]
    fn new(descriptor: Number<names::Descriptor, RawFd>) -> Result<Self> {
        let file = duplicate(descriptor.0)?;
        // SAFETY: the caller gives a file that stays as it is.
        Ok(Self(unsafe { MappedWords::map(&file)? }))
    }
}

#[pymethods]
impl PackedLinear {
    /// A layer of zeros from `inputs` to `outputs` numbers.
    #[new]
    #[pyo3(
        signature = (cpu, inputs, outputs, dtype, *, bias=false, parts=None, activations=None),
        text_signature = "(cpu, inputs, outputs, dtype, *, bias=False, parts=None, activations='exact')"
    )]
    fn new(
        py: Python<'_>,
        cpu: Py<Cpu>,
        inputs: Number<names::Inputs>,
        outputs: Number<names::Outputs>,
        dtype: OneOf<DType>,
        bias: bool,
        parts: Option<Numbers<names::Parts>>,
        activations: Option<OneOf<Activations>>,
    ) -> Result<Self> {
        let activations = activations.map_or_else(Activations::default, |word| word.0);
        let (inputs, outputs, dtype) = (inputs.0, outputs.0, dtype.0);
        let per_word = if dtype == DType::Bf16 { 2 } else { 1 };
        let fit = inputs > 0 && inputs.is_multiple_of(per_word);
        ensure!(fit, "inputs", "must be positive, and even for bfloat16");
        ensure!(outputs > 0, "outputs", "must be positive");
        let parts = parts.map_or_else(|| vec![outputs], |parts| parts.0);
        let sum = parts.iter().try_fold(0_usize, |sum, part| sum.checked_add(*part));
        let fit = !parts.contains(&0) && sum == Some(outputs);
        ensure!(fit, "parts", "must be positive, and {outputs} together");
        // Only the bias takes memory yet.
        let layer = run_on_numbers(py, outputs, || match dtype {
            DType::Bf16 => ops::PackedLinear::new(inputs, &parts, bias)
                .map(|layer| Layer::Bf16(layer.with_activations(activations))),
            DType::F32 => ops::PackedLinear::new(inputs, &parts, bias)
                .map(|layer| Layer::F32(layer.with_activations(activations))),
        });
        let layer = RwLock::new(layer?);
        Ok(Self { cpu, dtype, layer, parts, inputs, outputs })
    }

    /// Write `rows` rows of the weight, from output `start` on, from dense numbers at an address.
    fn copy_rows(
        &self,
        py: Python<'_>,
        start: Start,
        address: Address,
        rows: RowCount,
    ) -> Result<()> {
        let (start, rows) = (start.0, rows.0);
        self.check_outputs(start, rows)?;
        let weight = Matrix::dense(address, rows, self.inputs);
        let (memory, layer) = (&self.cpu.get().weights, &mut *self.write()?);
        // SAFETY: the caller gives the address of a weight of the layer's type, and keeps it.
        run_on_numbers(py, weight.numbers(), || unsafe {
            Ok(with_layer!(layer, layer => layer.copy_rows(memory, start, weight.rows()?))?)
        })
    }

    /// Write the weight of the part that starts at output `start`, a row of GGUF's blocks an output.
    fn copy_blocks(
        &self,
        py: Python<'_>,
        start: Start,
        address: Address,
        rows: RowCount,
        format: OneOf<Format>,
    ) -> Result<()> {
        let (start, rows, format) = (start.0, rows.0, format.0);
        let (cpu, layer) = (self.cpu.get(), &mut *self.write()?);
        with_layer!(&*layer, layer => layer.check_blocks(start, rows, format))?;
        let blocks = Matrix::dense(address, rows, format.row_bytes(self.inputs));
        // SAFETY: the caller gives the address of blocks of this format, and keeps them.
        run_on_numbers(py, blocks.numbers(), || unsafe {
            let (memory, team, blocks) = (&cpu.weights, &cpu.team, blocks.rows()?);
            let written = with_layer!(layer, layer => layer
                .copy_blocks(memory, cpu.form, team, start, format, blocks));
            Ok(written?)
        })
    }

    /// Copy rows of the weight, named by `count` int64 ids, to `out`, dense, in the layer's type.
    fn read_rows(
        &self,
        py: Python<'_>,
        ids: Number<names::Ids>,
        count: Count,
        out: Number<names::Out>,
    ) -> Result<()> {
        let count = count.0;
        let out = Matrix::dense(out, count, self.inputs);
        let (cpu, layer) = (self.cpu.get(), self.read()?);
        // SAFETY: the caller gives the addresses of ids and of rows of the layer's type, and keeps them.
        run_on_numbers(py, out.numbers(), || unsafe {
            let ids = self.checked_ids(Matrix::dense(ids, 1, count))?;
            with_layer!(&*layer, layer => layer.read_rows(&cpu.team, &ids, &out.rows_mut()?));
            Ok(())
        })
    }

    /// Bytes of weight and bias as they are kept.
    #[getter]
    fn num_bytes(&self) -> Result<usize> {
        Ok(with_layer!(&*self.read()?, layer => layer.num_bytes()))
    }

    /// What the part that starts at output `start` is kept as.
    fn format_at(&self, start: Start) -> Result<&'static str> {
        let number = self.part_at(start.0)?;
        let layer = self.read()?;
        let format = with_layer!(&*layer, layer => layer.formats().nth(number).flatten());
        let dense = DType::WORDS.iter().find(|(_, dtype)| *dtype == self.dtype);
        Ok(format.map_or(dense.map_or("", |(name, _)| name), Format::name))
    }

    /// Write the part that starts at output `start`, as it is laid out, to a file from byte `offset` on.
    fn write_laid_out(
        &self,
        py: Python<'_>,
        start: Start,
        descriptor: Number<names::Descriptor, RawFd>,
        offset: Number<names::Offset, u64>,
    ) -> Result<usize> {
        let (part, layer) = (self.part_at(start.0)?, self.read()?);
        let file = duplicate(descriptor.0)?;
        let bytes = with_layer!(&*layer, layer => layer.laid_out(part)).unwrap_or_default();
        py.detach(|| file.write_all_at(bytes, offset.0))?;
        Ok(bytes.len())
    }

    /// Take for the part that starts at output `start` what was written of one like it.
    #[pyo3(signature = (start, file, offset, num_bytes, format=None))]
    fn map_laid_out(
        &self,
        start: Start,
        file: &LaidOutFile,
        offset: Number<names::Offset>,
        num_bytes: Number<names::NumBytes>,
        format: Option<OneOf<Format>>,
    ) -> Result<()> {
        let part = self.part_at(start.0)?;
        let words = file.0.part(offset.0, num_bytes.0).ok_or_else(|| {
            out_of_range("offset", "must be a multiple of 64 and leave room for num_bytes")
        })?;
        let (form, format) = (self.cpu.get().form, format.map(|word| word.0));
        let mut layer = self.write()?;
        Ok(with_layer!(&mut *layer, layer => layer.map_laid_out(form, part, format, &words))?)
    }

    /// Write `count` biases, from output `start` on, from dense numbers at an address.
    fn copy_bias(&self, start: Start, address: Address, count: Count) -> Result<()> {
        let (start, count) = (start.0, count.0);
        self.check_outputs(start, count)?;
        let bias = Matrix::dense(address, 1, count);
        let mut layer = self.write()?;
        let has_bias = with_layer!(&*layer, layer => layer.has_bias());
        ensure!(has_bias, "bias", "cannot be written: the layer has none");
        // SAFETY: the caller gives the address of biases of the layer's type, and keeps them.
        unsafe {
            with_layer!(&mut *layer, layer => layer.copy_bias(start, bias.rows()?.row(0)));
        }
        Ok(())
    }

    /// Write x W^T + bias + residual for `rows` rows to `out`.
    #[pyo3(
        signature = (x, rows, x_stride, out, residual=None, *, wide_out=false),
        text_signature = "($self, x, rows, x_stride, out, residual=0, *, wide_out=False)"
    )]
    fn forward(
        &self,
        py: Python<'_>,
        x: Number<names::X>,
        rows: RowCount,
        x_stride: Number<names::XStride>,
        out: Number<names::Out>,
        residual: Option<Number<names::Residual>>,
        wide_out: bool,
    ) -> Result<()> {
        let rows = rows.0;
        let residual = residual.filter(|address| address.0 != 0);
        let x = Matrix::strided(x, (rows, self.inputs), x_stride.0);
        let residual = residual.map(|address| Matrix::dense(address, rows, self.outputs));
        let tensors = (x, residual, Matrix::dense(out, rows, self.outputs));
        let (cpu, layer) = (self.cpu.get(), self.read()?);
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        py.detach(|| unsafe {
            match &*layer {
                Layer::Bf16(layer) if wide_out => run_product::<_, f32>(layer, cpu, tensors),
                Layer::Bf16(layer) => run_product::<_, Bf16>(layer, cpu, tensors),
                Layer::F32(layer) => run_product::<_, f32>(layer, cpu, tensors),
            }
        })
    }
}
