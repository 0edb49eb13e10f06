//! The Python class `PackedLinear`.

use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use prefixcache_cpu::{Bf16, Element};
use prefixcache_ops as ops;
use pyo3::prelude::*;

use crate::arguments::{Number, OneOf};
use crate::cpu::{Cpu, DType, Matrix};
use crate::detach::run_on_numbers;
use crate::errors::{IntoPyErr, in_use, out_of_range};
use crate::names;

/// A linear layer, its weight packed for the kernels of the CPU.
#[pyclass(frozen, module = "prefixcache._core")]
pub struct PackedLinear {
    cpu: Py<Cpu>,
    pub dtype: DType,
    layer: RwLock<Layer>,
    pub inputs: usize,
    pub outputs: usize,
}

pub enum Layer {
    Bf16(ops::PackedLinear<Bf16>),
    F32(ops::PackedLinear<f32>),
}

/// A number type of layers.
pub trait LayerElement: Element {
    /// The layer, if it is of this type.
    fn of(layer: &Layer) -> Option<&ops::PackedLinear<Self>>;
}

impl LayerElement for Bf16 {
    fn of(layer: &Layer) -> Option<&ops::PackedLinear<Self>> {
        match layer {
            Layer::Bf16(layer) => Some(layer),
            Layer::F32(_) => None,
        }
    }
}

impl LayerElement for f32 {
    fn of(layer: &Layer) -> Option<&ops::PackedLinear<Self>> {
        match layer {
            Layer::F32(layer) => Some(layer),
            Layer::Bf16(_) => None,
        }
    }
}

impl PackedLinear {
    pub fn read(&self) -> PyResult<RwLockReadGuard<'_, Layer>> {
        self.layer.try_read().map_err(|_| in_use("the layer"))
    }

    fn write(&self) -> PyResult<RwLockWriteGuard<'_, Layer>> {
        self.layer.try_write().map_err(|_| in_use("the layer"))
    }

    fn check_outputs(&self, start: usize, count: usize) -> PyResult<()> {
        let end = start.checked_add(count);
        match end.is_some_and(|end| end <= self.outputs) {
            true => Ok(()),
            false => {
                let reason = format!("must leave room for {count} of {} outputs", self.outputs);
                Err(out_of_range("start", reason))
            }
        }
    }
}

/// Where the rows of a product are.
struct Product {
    x: Matrix,
    residual: Option<Matrix>,
    out: Matrix,
}

impl Product {
    /// # Safety
    /// The addresses are those of numbers of these types, as `forward` demands.
    unsafe fn run<E: Element, O: Element>(
        &self,
        layer: &ops::PackedLinear<E>,
        cpu: &Cpu,
    ) -> PyResult<()> {
        // SAFETY: the caller's promise.
        let (x, residual, out) = unsafe {
            let residual = self.residual.map(|residual| residual.rows()).transpose()?;
            (self.x.rows()?, residual, self.out.rows_mut::<O>()?)
        };
        layer.forward(cpu.form, &cpu.team, x, residual, &out);
        Ok(())
    }
}

#[pymethods]
impl PackedLinear {
    /// A layer of zeros from `inputs` to `outputs` numbers of type "bfloat16" or "float32".
    #[new]
    #[pyo3(signature = (cpu, inputs, outputs, dtype, *, bias=false))]
    fn new(
        py: Python<'_>,
        cpu: Py<Cpu>,
        inputs: Number<names::Inputs>,
        outputs: Number<names::Outputs>,
        dtype: OneOf<DType>,
        bias: bool,
    ) -> PyResult<Self> {
        let (inputs, outputs, dtype) = (inputs.0, outputs.0, dtype.0);
        let per_word = if dtype == DType::Bf16 { 2 } else { 1 };
        if inputs == 0 || !inputs.is_multiple_of(per_word) {
            return Err(out_of_range(
                "inputs",
                "must be positive, and even for bfloat16",
            ));
        }
        if outputs == 0 {
            return Err(out_of_range("outputs", "must be positive"));
        }
        let memory = &cpu.get().weights;
        // Only the bias is written: the weight's zeroes are the system's.
        let layer = run_on_numbers(py, outputs, || match dtype {
            DType::Bf16 => {
                ops::PackedLinear::zeroed(memory, inputs, outputs, bias).map(Layer::Bf16)
            }
            DType::F32 => ops::PackedLinear::zeroed(memory, inputs, outputs, bias).map(Layer::F32),
        });
        let layer = RwLock::new(layer.map_err(IntoPyErr::into_py_err)?);
        Ok(Self {
            cpu,
            dtype,
            layer,
            inputs,
            outputs,
        })
    }

    /// Write `rows` rows of the weight, from output `start` on, from dense numbers at an address.
    fn copy_rows(
        &self,
        py: Python<'_>,
        start: Number<names::Start>,
        address: Number<names::Address>,
        rows: Number<names::RowCount>,
    ) -> PyResult<()> {
        let (start, rows) = (start.0, rows.0);
        self.check_outputs(start, rows)?;
        let weight = Matrix::dense(address, rows, self.inputs);
        let layer = &mut *self.write()?;
        // SAFETY: the caller gives the address of a weight of the layer's type, and keeps it.
        run_on_numbers(py, weight.numbers(), || unsafe {
            match layer {
                Layer::Bf16(layer) => layer.copy_rows(start, weight.rows()?),
                Layer::F32(layer) => layer.copy_rows(start, weight.rows()?),
            }
            Ok(())
        })
    }

    /// Write `count` biases, from output `start` on, from dense numbers at an address.
    fn copy_bias(
        &self,
        start: Number<names::Start>,
        address: Number<names::Address>,
        count: Number<names::Count>,
    ) -> PyResult<()> {
        let (start, count) = (start.0, count.0);
        self.check_outputs(start, count)?;
        let bias = Matrix::dense(address, 1, count);
        let mut layer = self.write()?;
        let with_bias = match &*layer {
            Layer::Bf16(layer) => layer.has_bias(),
            Layer::F32(layer) => layer.has_bias(),
        };
        if !with_bias {
            return Err(out_of_range(
                "bias",
                "cannot be written: the layer has none",
            ));
        }
        // SAFETY: the caller gives the address of biases of the layer's type, and keeps them.
        unsafe {
            match &mut *layer {
                Layer::Bf16(layer) => layer.copy_bias(start, bias.rows()?.row(0)),
                Layer::F32(layer) => layer.copy_bias(start, bias.rows()?.row(0)),
            }
        }
        Ok(())
    }

    /// Write x W^T + bias + residual for `rows` rows to `out`, dense; a residual of 0 is none.
    ///
    /// x has a row every `x_stride` numbers; `out` and the residual are dense. They are of the
    /// layer's type, but for a bfloat16 layer with `wide_out`, whose `out` and residual are float32.
    #[pyo3(
        signature = (x, rows, x_stride, out, residual=None, *, wide_out=false),
        text_signature = "($self, x, rows, x_stride, out, residual=0, *, wide_out=False)"
    )]
    fn forward(
        &self,
        py: Python<'_>,
        x: Number<names::X>,
        rows: Number<names::RowCount>,
        x_stride: Number<names::XStride>,
        out: Number<names::Out>,
        residual: Option<Number<names::Residual>>,
        wide_out: bool,
    ) -> PyResult<()> {
        let rows = rows.0;
        let residual = residual.filter(|address| address.0 != 0);
        let product = Product {
            x: Matrix::strided(x, (rows, self.inputs), x_stride.0),
            residual: residual.map(|address| Matrix::dense(address, rows, self.outputs)),
            out: Matrix::dense(out, rows, self.outputs),
        };
        let (cpu, layer) = (self.cpu.get(), self.read()?);
        // SAFETY: the caller gives addresses of tensors of these types and shapes, and keeps them.
        py.detach(|| unsafe {
            match &*layer {
                Layer::Bf16(layer) if wide_out => product.run::<Bf16, f32>(layer, cpu),
                Layer::Bf16(layer) => product.run::<Bf16, Bf16>(layer, cpu),
                Layer::F32(layer) => product.run::<f32, f32>(layer, cpu),
            }
        })
    }
}
