//! Memory for operands, with guards around it.

use fuselane::{DType, Element, View, ViewMut};
use half::{bf16, f16};

/// Elements before and after a tensor: as many as the widest block of lanes.
const GUARD: usize = 16;

/// A dense tensor of any dtype between two guards of NaN. A read beyond an input spoils the
/// results, and a write beyond an output is seen by [`Tensor::is_intact`].
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    memory: Memory,
    shape: Vec<usize>,
}

#[derive(Debug, Clone)]
enum Memory {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F64(Vec<f64>),
}

/// A NaN that no arithmetic makes: its payload is its own.
trait Poison: Element {
    const POISON: Self;
    fn is_poison(self) -> bool;
}

macro_rules! poison {
    ($($type:ty: $bits:expr),*) => {
        $(impl Poison for $type {
            const POISON: Self = <$type>::from_bits($bits);
            fn is_poison(self) -> bool {
                self.to_bits() == $bits
            }
        })*
    };
}
poison!(f32: 0x7fed_1234, f16: 0x7eab, bf16: 0x7feb, f64: 0x7ff9_dead_1234_5678);

/// Runs `$body` with `$data` bound to the vector in a [`Memory`].
macro_rules! with_memory {
    ($memory:expr, $data:ident => $body:expr) => {
        match $memory {
            Memory::F32($data) => $body,
            Memory::F16($data) => $body,
            Memory::BF16($data) => $body,
            Memory::F64($data) => $body,
        }
    };
}

impl Tensor {
    /// An output that nothing has written to yet.
    pub(crate) fn unwritten(dtype: DType, shape: &[usize]) -> Self {
        fn poisoned<T: Poison>(shape: &[usize]) -> Vec<T> {
            vec![T::POISON; shape.iter().product::<usize>() + 2 * GUARD]
        }
        let memory = match dtype {
            DType::F32 => Memory::F32(poisoned(shape)),
            DType::F16 => Memory::F16(poisoned(shape)),
            DType::BF16 => Memory::BF16(poisoned(shape)),
            DType::F64 => Memory::F64(poisoned(shape)),
        };
        Self { memory, shape: shape.to_vec() }
    }

    /// An input: `values`, each rounded to `dtype`.
    pub(crate) fn rounded(dtype: DType, values: &[f64], shape: &[usize]) -> Self {
        fn fill<T: Element>(to: &mut [T], values: &[f64]) {
            assert_eq!(to.len(), values.len() + 2 * GUARD, "values of a tensor");
            to[GUARD..].iter_mut().zip(values).for_each(|(to, value)| *to = T::from_f64(*value));
        }
        let mut tensor = Self::unwritten(dtype, shape);
        with_memory!(&mut tensor.memory, data => fill(data, values));
        tensor
    }

    pub(crate) fn dtype(&self) -> DType {
        match self.memory {
            Memory::F32(_) => DType::F32,
            Memory::F16(_) => DType::F16,
            Memory::BF16(_) => DType::BF16,
            Memory::F64(_) => DType::F64,
        }
    }

    pub(crate) fn view(&self) -> View<'_> {
        let view = with_memory!(&self.memory, data => {
            View::new(&data[GUARD..data.len() - GUARD], &self.shape)
        });
        view.expect("memory fits its shape")
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        let view = with_memory!(&mut self.memory, data => {
            let end = data.len() - GUARD;
            ViewMut::new(&mut data[GUARD..end], &self.shape)
        });
        view.expect("memory fits its shape")
    }

    /// The elements, as the reference takes them.
    pub(crate) fn values(&self) -> Vec<f64> {
        with_memory!(&self.memory, data => {
            data[GUARD..data.len() - GUARD].iter().map(|value| value.to_f64()).collect()
        })
    }

    /// Whether both guards are as they were.
    pub(crate) fn is_intact(&self) -> bool {
        fn intact<T: Poison>(data: &[T]) -> bool {
            let (first, rest) = data.split_at(GUARD);
            first.iter().chain(&rest[rest.len() - GUARD..]).all(|value| value.is_poison())
        }
        with_memory!(&self.memory, data => intact(data))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fuselane::Act;

    #[test]
    fn guards_see_a_write_beyond_the_tensor() {
        for dtype in DType::ALL {
            let mut tensor = Tensor::unwritten(dtype, &[2, 3]);
            assert!(tensor.values().iter().all(|value| value.is_nan()));
            assert!(tensor.is_intact());
            let zeros = Tensor::rounded(dtype, &[0.0; 6], &[2, 3]);
            Act::Sigmoid.forward_into(zeros.view(), tensor.view_mut()).unwrap();
            assert_eq!((tensor.values(), tensor.dtype()), (vec![0.5; 6], dtype));
            assert!(tensor.is_intact());
            tensor.shape = vec![7];
            with_memory!(&mut tensor.memory, data => data[GUARD + 6] = data[GUARD]);
            assert!(!tensor.is_intact());
        }
    }
}
