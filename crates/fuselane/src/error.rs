//! What can be wrong with a call, as a value.

/// The result of every fallible call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A call that was refused before anything was written.
///
/// It names the operator, the argument at fault, what came and what was expected.
///
/// ```
/// use fuselane::{Normalize, NormalizeForward, View, ViewMut};
/// let (x, weight, mut o) = ([1.0f32; 8], [1.0f32; 3], [0.0f32; 8]);
/// let error = Normalize::rms_norm()
///     .forward_into(NormalizeForward {
///         weight: Some(View::new(&weight, &[3])?),
///         ..NormalizeForward::new(View::new(&x, &[2, 4])?, ViewMut::new(&mut o, &[2, 4])?)
///     })
///     .unwrap_err();
/// assert_eq!(error.operator(), "normalize");
/// assert_eq!(error.argument(), "weight");
/// assert_eq!(error.to_string(), "normalize: weight has shape [3], expected [4] (last dimension of x)");
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{operator}: {argument} {got}, expected {expected}")]
pub struct Error {
    operator: &'static str,
    argument: &'static str,
    got: String,
    expected: String,
}

impl Error {
    /// An error of `operator` about `argument`: `got` continues the sentence "`argument` ...",
    /// `expected` ends it. It is public for other backends, which refuse what they lack in the same
    /// form.
    ///
    /// ```
    /// let error = fuselane::Error::new("softmax", "x", "has dtype f64", "f32, f16 or bf16");
    /// assert_eq!(error.to_string(), "softmax: x has dtype f64, expected f32, f16 or bf16");
    /// ```
    pub fn new(
        operator: &'static str,
        argument: &'static str,
        got: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Self { operator, argument, got: got.into(), expected: expected.into() }
    }

    /// The operator that refused the call.
    pub fn operator(&self) -> &'static str {
        self.operator
    }

    /// The argument or option at fault.
    pub fn argument(&self) -> &'static str {
        self.argument
    }

    /// What came, as in "has shape \[3\]".
    pub fn got(&self) -> &str {
        &self.got
    }

    /// What was expected instead.
    pub fn expected(&self) -> &str {
        &self.expected
    }
}
