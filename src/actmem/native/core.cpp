// The hot path of the tape: record, pack, open and replay plain operators.
//
// NOTE [ The native core ]
// `engine/tape.py` is the reference, and stays in charge. Its values, nodes and handles exist here a second time, as
// Python types with the same attributes, so that both sides work on one graph: at any moment, in the middle of a block
// call or of a replay, either may go on where the other stopped. What this file does not know it does not decide: an
// operator that writes, draws or is never replayed, a subclass, a conjugate view, a constant, hooks around the tape,
// all go to the Python code, as they would without this file. References are counted by Python on both sides, because
// whether anything can still reach a value is asked of that count.
//
// The tape is on torch's stack of dispatch modes like any other mode, in its place. torch calls the innermost mode
// through a table of functions. Ours answers `dispatch` and `detach` while that mode is a native tape, and passes
// everything else on to torch's own.

#include <Python.h>
#include <structmember.h>

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

namespace torch::jit {
TORCH_PYTHON_API py::object toPyObject(c10::IValue value);
}

namespace {

using at::Tensor;
using c10::IValue;
using c10::StorageImpl;
constexpr int64_t UNCHECKED = -1;

// ---------------------------------------------------------------------------------------------------- Python's side

// What this file calls, given by `configure`.
struct {
  PyObject *describe, *meet, *hold_in_handler, *hold, *pack, *settle, *note_holder, *is_trainable;
  PyObject *unpack, *run, *enter, *leave, *held, *asked_by_function, *opened_parameter, *without_bits, *numerics, *copied;
  PyObject *Parameter, *RECOMPUTE, *SAVE, *SAVED, *OFFLOADED, *CUT, *EXTERNAL, *BARRIER, *UNSEEN, *nothing;
} py_;

[[noreturn]] void raise() {
  python_error error;
  error.persist();
  throw error;
}

// An owned reference to a Python object.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : p_(owned) {}
  static Ref of(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Ref(borrowed);
  }
  Ref(const Ref& other) : p_(other.p_) { Py_XINCREF(p_); }
  Ref(Ref&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(p_, other.p_);
    return *this;
  }
  ~Ref() { Py_XDECREF(p_); }
  PyObject* get() const { return p_; }
  PyObject* release() { return std::exchange(p_, nullptr); }
  explicit operator bool() const { return p_ != nullptr; }

 private:
  PyObject* p_ = nullptr;
};

Ref checked(PyObject* owned) {
  if (!owned) raise();
  return Ref(owned);
}

template <class... A>
Ref call(PyObject* function, A... args) {
  PyObject* given[] = {args...};
  return checked(PyObject_Vectorcall(function, given, sizeof...(A), nullptr));
}

struct Name {  // of an attribute
  PyObject* text;
  explicit Name(const char* letters) : text(PyUnicode_InternFromString(letters)) {}
};

#define ATTRIBUTE(of, name)                                  \
  ([](PyObject* owner) {                                     \
    static Name interned(#name);                             \
    return checked(PyObject_GetAttr(owner, interned.text));  \
  }(of))

// An attribute that may not be there: no exception is made for it.
Ref attribute_or_null(PyObject* owner, const Name& name) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  int status = PyObject_GetOptionalAttr(owner, name.text, &found);
#else
  int status = _PyObject_LookupAttr(owner, name.text, &found);
#endif
  if (status < 0) raise();
  return Ref(found);
}

void set(PyObject*& field, PyObject* borrowed) {
  Py_XINCREF(borrowed);
  PyObject* old = std::exchange(field, borrowed);
  Py_XDECREF(old);
}

Ref wrap(const Tensor& tensor) { return checked(THPVariable_Wrap(tensor)); }

struct WithGIL {
  PyGILState_STATE state = PyGILState_Ensure();
  ~WithGIL() { PyGILState_Release(state); }
};

struct WithoutGIL {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGIL() { PyEval_RestoreThread(state); }
};

// ---------------------------------------------------------------------------------------------------- the types

struct Operator {  // what `engine.operators.Operator` says of one
  c10::OperatorHandle handle;
  Ref python;      // that object
  Ref func;
  bool view = false, sets_bits = false, plain = false, may_alias = false, fills_saved = false, numerics = false;
  size_t num_arguments = 0, num_returns = 0;
  int dropout = -1;       // the position of a probability that makes it random; plain where that is 0
  bool in_place = false;  // reads and writes its first argument, returns it, and is plain otherwise
  };

// There are many of the next ones, so what few of them have is apart.

struct Geometry {
  c10::SmallVector<int64_t, 8> numbers;  // sizes, then strides
  int64_t offset;
  at::ScalarType dtype;

  explicit Geometry(const Tensor& t) : offset(t.storage_offset()), dtype(t.scalar_type()) {
    numbers.append(t.sizes().begin(), t.sizes().end());
    numbers.append(t.strides().begin(), t.strides().end());
  }
  at::IntArrayRef size() const { return {numbers.data(), numbers.size() / 2}; }
  at::IntArrayRef stride() const { return {numbers.data() + numbers.size() / 2, numbers.size() / 2}; }
};

struct Seldom {
  PyObject *tensor = nullptr, *coverage = nullptr, *pending = nullptr, *row = nullptr;
};

struct Value {
  PyObject_HEAD
  PyObject* weak;
  c10::weak_intrusive_ptr<StorageImpl> storage;
  Tensor held;      // what holds it, if that is a tensor
  PyObject* boxed;  // and if it is not
  PyObject *node, *why, *debts;
  Seldom* seldom;
  int64_t version, num_bytes, order;
  int slot;
  bool own, saved, reserved;
};

struct Reference {
  int argument, item;  // `item`: position in a list, or -1
  Ref value;
  Geometry view;
};

struct Several {
  std::vector<std::pair<int, std::pair<size_t, bool>>> lists;  // argument, length, whether of optional tensors
  std::vector<std::pair<int, Ref>> outs;  // slot, and a weak reference to the value, if there are several
};

struct Node {
  PyObject_HEAD
  const Operator* description;
  std::vector<IValue> args;  // with None for each tensor, and for each list that has one
  std::vector<Reference> refs;
  Several* several;
  uint64_t flags;
  uint64_t visit;  // of the walk that met it last
  bool has_flags;
  bool in_place;  // writes its first argument; `outs` has that alone
  c10::Device device;  // where that is
};

struct Handle {
  PyObject_HEAD
  PyObject *tape, *value, *checksum;
  Geometry view;
};

struct Holders {  // `holdings._Holders`
  PyObject_HEAD
  PyObject* values;
  long long most;
};

struct Tape {  // the part of a tape's state that this file reads and writes
  PyObject_HEAD
  PyObject *values, *recent, *provisional, *known, *cut, *inputs, *trainable, *outer, *reserve, *observation, *away;
  PyObject *verdicts, *counts, *places, *free, *lock;
  long long budget, index;
  char paused, bits, numbered, in_fake_mode;
  at::ScalarType dtype;
};

extern PyTypeObject ValueType, NodeType, HandleType, HoldersType, TapeType;

Value* native(PyObject* value) { return Py_TYPE(value) == &ValueType ? reinterpret_cast<Value*>(value) : nullptr; }

Value* new_value(StorageImpl* storage, PyObject* node, int slot, PyObject* why) {
  auto* v = PyObject_New(Value, &ValueType);
  if (!v) raise();
  new (&v->storage) c10::weak_intrusive_ptr<StorageImpl>(
      c10::intrusive_ptr<StorageImpl>::reclaim_copy(storage));
  new (&v->held) Tensor();
  v->weak = v->boxed = v->debts = nullptr;
  v->seldom = nullptr;
  Py_XINCREF(node);
  Py_XINCREF(why);
  v->node = node, v->why = why, v->slot = slot;
  v->version = UNCHECKED, v->num_bytes = 0, v->order = -1;
  v->own = v->saved = v->reserved = false;
  return v;
}

// A chain of values may be long: it is released in a loop and not by recursion.
thread_local std::vector<PyObject*>* releasing = nullptr;

void release_chain(PyObject* node) {
  if (!node) return;
  if (releasing) {
    releasing->push_back(node);
    return;
  }
  std::vector<PyObject*> waiting{node};
  releasing = &waiting;
  while (!waiting.empty()) {
    PyObject* next = waiting.back();
    waiting.pop_back();
    Py_DECREF(next);
  }
  releasing = nullptr;
}

void dealloc_value(PyObject* self) {
  auto* v = reinterpret_cast<Value*>(self);
  if (v->weak) PyObject_ClearWeakRefs(self);
  PyObject* node = std::exchange(v->node, nullptr);
  for (PyObject** field : {&v->boxed, &v->why, &v->debts}) Py_CLEAR(*field);
  if (Seldom* rest = std::exchange(v->seldom, nullptr)) {
    for (PyObject* field : {rest->tensor, rest->coverage, rest->pending, rest->row}) Py_XDECREF(field);
    delete rest;
  }
  v->held.~Tensor();
  v->storage.~weak_intrusive_ptr();
  PyObject_Free(self);
  release_chain(node);
}

void dealloc_node(PyObject* self) {
  auto* n = reinterpret_cast<Node*>(self);
  n->args.~vector();
  n->refs.~vector();
  delete n->several;
  PyObject_Free(self);
}

void dealloc_handle(PyObject* self) {
  auto* h = reinterpret_cast<Handle*>(self);
  PyObject* value = std::exchange(h->value, nullptr);
  Py_CLEAR(h->tape);
  Py_CLEAR(h->checksum);
  h->view.~Geometry();
  PyObject_Free(self);
  release_chain(value);
}

// ---------------------------------------------------------------------------------------------------- their attributes

PyObject* given(PyObject* object) { return Py_NewRef(object ? object : Py_None); }

template <PyObject* Value::*Field>
PyObject* get_object(PyObject* self, void*) {
  return given(reinterpret_cast<Value*>(self)->*Field);
}
template <PyObject* Value::*Field>
int set_object(PyObject* self, PyObject* x, void*) {
  set(reinterpret_cast<Value*>(self)->*Field, x == Py_None ? nullptr : x);
  return 0;
}
template <PyObject* Seldom::*Field>
PyObject* get_seldom(PyObject* self, void*) {
  Seldom* rest = reinterpret_cast<Value*>(self)->seldom;
  return given(rest ? rest->*Field : nullptr);
}
void set_seldom(Value* v, PyObject* Seldom::*field, PyObject* x) {
  if (!v->seldom && x) v->seldom = new Seldom();
  if (v->seldom) set(v->seldom->*field, x);
}
template <PyObject* Seldom::*Field>
int set_seldom_object(PyObject* self, PyObject* x, void*) {
  set_seldom(reinterpret_cast<Value*>(self), Field, x == Py_None ? nullptr : x);
  return 0;
}
template <int64_t Value::*Field>
PyObject* get_number(PyObject* self, void*) {
  return PyLong_FromLongLong(reinterpret_cast<Value*>(self)->*Field);
}
template <int64_t Value::*Field>
int set_number(PyObject* self, PyObject* x, void*) {
  reinterpret_cast<Value*>(self)->*Field = PyLong_AsLongLong(x);
  return PyErr_Occurred() ? -1 : 0;
}
template <bool Value::*Field>
PyObject* get_bool(PyObject* self, void*) {
  return PyBool_FromLong(reinterpret_cast<Value*>(self)->*Field);
}
template <bool Value::*Field>
int set_bool(PyObject* self, PyObject* x, void*) {
  reinterpret_cast<Value*>(self)->*Field = PyObject_IsTrue(x) == 1;
  return 0;
}

PyObject* get_held(PyObject* self, void*) {
  auto* v = reinterpret_cast<Value*>(self);
  return v->held.defined() ? THPVariable_Wrap(v->held) : given(v->boxed);
}
int set_held(PyObject* self, PyObject* x, void*) {
  auto* v = reinterpret_cast<Value*>(self);
  if (THPVariable_Check(x)) {
    v->held = THPVariable_Unpack(x);
    set(v->boxed, nullptr);
  } else {
    v->held = Tensor();
    set(v->boxed, x == Py_None ? nullptr : x);
  }
  return 0;
}
PyObject* get_storage(PyObject* self, void*) {
  auto alive = reinterpret_cast<Value*>(self)->storage.lock();
  if (!alive) return Py_NewRef(py_.nothing);
  Ref storage(THPStorage_Wrap(c10::Storage(std::move(alive))));
  return storage ? PyWeakref_NewRef(storage.get(), nullptr) : nullptr;
}
PyObject* get_slot(PyObject* self, void*) { return PyLong_FromLong(reinterpret_cast<Value*>(self)->slot); }
int set_slot(PyObject* self, PyObject* x, void*) {
  reinterpret_cast<Value*>(self)->slot = static_cast<int>(PyLong_AsLong(x));
  return PyErr_Occurred() ? -1 : 0;
}

PyObject* written_unseen(PyObject* self, PyObject* shown) {
  const Tensor& t = THPVariable_Unpack(shown);
  return PyBool_FromLong(reinterpret_cast<Value*>(self)->slot >= 0 && !t.is_inference() && t._version() != 0);
}

PyMethodDef value_methods[] = {{"written_unseen", written_unseen, METH_O, nullptr}, {nullptr}};

#define OBJECT(name) {#name, get_object<&Value::name>, set_object<&Value::name>, nullptr, nullptr}
#define SELDOM(name) {#name, get_seldom<&Seldom::name>, set_seldom_object<&Seldom::name>, nullptr, nullptr}
PyGetSetDef value_attributes[] = {
    OBJECT(node),
    OBJECT(why),
    OBJECT(debts),
    SELDOM(tensor),
    SELDOM(coverage),
    SELDOM(pending),
    SELDOM(row),
    {"held", get_held, set_held, nullptr, nullptr},
    {"storage", get_storage, nullptr, nullptr, nullptr},
    {"slot", get_slot, set_slot, nullptr, nullptr},
    {"version", get_number<&Value::version>, set_number<&Value::version>, nullptr, nullptr},
    {"num_bytes", get_number<&Value::num_bytes>, set_number<&Value::num_bytes>, nullptr, nullptr},
    {"order", get_number<&Value::order>, set_number<&Value::order>, nullptr, nullptr},
    {"own", get_bool<&Value::own>, set_bool<&Value::own>, nullptr, nullptr},
    {"saved", get_bool<&Value::saved>, set_bool<&Value::saved>, nullptr, nullptr},
    {"reserved", get_bool<&Value::reserved>, set_bool<&Value::reserved>, nullptr, nullptr},
    {nullptr}};
#undef OBJECT
#undef SELDOM

PyObject* tuple_of(at::IntArrayRef numbers) {
  PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; made && i < numbers.size(); i++)
    PyTuple_SET_ITEM(made, i, PyLong_FromLongLong(numbers[i]));
  return made;
}

PyObject* dtype_object(at::ScalarType dtype) {
  return Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

Ref position(const Node* n, int argument) {  // a number, or the name of one that is given by name only
  const auto& a = n->description->handle.schema().arguments()[argument];
  return checked(a.kwarg_only() ? PyUnicode_FromString(a.name().c_str()) : PyLong_FromLong(argument));
}

Several& several(Node* n) {
  if (!n->several) n->several = new Several();
  return *n->several;
}

Ref argument_object(Node* n, size_t i) {
  if (n->several)
    for (auto& [argument, list] : n->several->lists) {
      if (argument != static_cast<int>(i)) continue;
      Ref made = checked(PyList_New(static_cast<Py_ssize_t>(list.first)));
      for (size_t j = 0; j < list.first; j++) PyList_SET_ITEM(made.get(), j, Py_NewRef(Py_None));
      return made;
    }
  return Ref(torch::jit::toPyObject(n->args[i]).release().ptr());
}

// Run a getter, and pass on what it throws.
template <class F>
PyObject* guarded(F f) {
  try {
    return f();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
    return nullptr;
  }
}

PyObject* get_func(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<Node*>(self)->description->func.get());
}

PyObject* get_args(PyObject* self, void*) {
  return guarded([&] {
    auto* n = reinterpret_cast<Node*>(self);
    Ref made = checked(PyList_New(0));
    for (size_t i = 0; i < n->args.size(); i++)
      if (!n->description->handle.schema().arguments()[i].kwarg_only() &&
          PyList_Append(made.get(), argument_object(n, i).get()) < 0)
        raise();
    return made.release();
  });
}

PyObject* get_kwargs(PyObject* self, void*) {
  return guarded([&] {
    auto* n = reinterpret_cast<Node*>(self);
    Ref made = checked(PyDict_New());
    for (size_t i = 0; i < n->args.size(); i++) {
      const auto& a = n->description->handle.schema().arguments()[i];
      if (a.kwarg_only() && PyDict_SetItemString(made.get(), a.name().c_str(), argument_object(n, i).get()) < 0)
        raise();
    }
    return made.release();
  });
}

PyObject* get_refs(PyObject* self, void*) {
  return guarded([&] {
    auto* n = reinterpret_cast<Node*>(self);
    Ref made = checked(PyList_New(0));
    for (auto& r : n->refs) {
      Ref where = position(n, r.argument), size(tuple_of(r.view.size())), stride(tuple_of(r.view.stride()));
      Ref dtype(dtype_object(r.view.dtype));
      Ref item = checked(Py_BuildValue(
          "(OiO(OOLOi))", where.get(), r.item, r.value.get(), size.get(), stride.get(),
          static_cast<long long>(r.view.offset), dtype.get(), 0));
      if (PyList_Append(made.get(), item.get()) < 0) raise();
    }
    return made.release();
  });
}

PyObject* get_outs(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    auto* n = reinterpret_cast<Node*>(self);
    if (!n->several || n->several->outs.empty()) Py_RETURN_NONE;
    Ref made = checked(PyList_New(0));
    for (auto& [slot, value] : n->several->outs) {
      Ref item = checked(Py_BuildValue("(iO)", slot, value.get()));
      if (PyList_Append(made.get(), item.get()) < 0) raise();
    }
    return made.release();
  });
}

std::unordered_map<uint64_t, Ref>& all_flags() {
  static auto* known = new std::unordered_map<uint64_t, Ref>();
  return *known;
}

PyObject* get_flags(PyObject* self, void*) {
  auto* n = reinterpret_cast<Node*>(self);
  if (!n->has_flags) Py_RETURN_NONE;
  return given(all_flags()[n->flags].get());
}

PyObject* get_none(PyObject*, void*) { Py_RETURN_NONE; }

PyObject* get_writes(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    auto* n = reinterpret_cast<Node*>(self);
    if (!n->in_place) Py_RETURN_NONE;
    Ref device(torch::jit::toPyObject(IValue(n->device)).release().ptr());
    return Py_BuildValue("[(iiiO)]", 0, -1, -1, device.get());
  });
}

PyObject* get_parents(PyObject*, void*) { return PyTuple_New(0); }

PyGetSetDef node_attributes[] = {
    {"func", get_func, nullptr, nullptr, nullptr},     {"args", get_args, nullptr, nullptr, nullptr},
    {"kwargs", get_kwargs, nullptr, nullptr, nullptr}, {"refs", get_refs, nullptr, nullptr, nullptr},
    {"outs", get_outs, nullptr, nullptr, nullptr},     {"flags", get_flags, nullptr, nullptr, nullptr},
    {"writes", get_writes, nullptr, nullptr, nullptr},   {"state", get_none, nullptr, nullptr, nullptr},
    {"parents", get_parents, nullptr, nullptr, nullptr}, {nullptr}};

PyMemberDef handle_members[] = {
    {"tape", T_OBJECT, offsetof(Handle, tape), READONLY, nullptr},
    {"value", T_OBJECT, offsetof(Handle, value), 0, nullptr},
    {"checksum", T_OBJECT, offsetof(Handle, checksum), 0, nullptr},
    {nullptr}};

PyObject* get_view(PyObject* self, void*) {
  return guarded([&] {
    auto* h = reinterpret_cast<Handle*>(self);
    Ref size = checked(tuple_of(h->view.size())), stride = checked(tuple_of(h->view.stride()));
    Ref dtype(dtype_object(h->view.dtype));
    auto offset = static_cast<long long>(h->view.offset);
    return Py_BuildValue("(OOLOi)", size.get(), stride.get(), offset, dtype.get(), 0);
  });
}

PyGetSetDef handle_attributes[] = {{"view", get_view, nullptr, nullptr, nullptr}, {nullptr}};

PyMemberDef holders_members[] = {
    {"values", T_OBJECT, offsetof(Holders, values), 0, nullptr},
    {"most", T_LONGLONG, offsetof(Holders, most), 0, nullptr},
    {nullptr}};

void dealloc_holders(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Holders*>(self)->values);
  PyObject_Free(self);
}

#define MEMBER(name, kind, field) {name, kind, offsetof(Tape, field), 0, nullptr}
PyMemberDef tape_members[] = {
    MEMBER("_values", T_OBJECT, values),       MEMBER("_recent", T_OBJECT, recent),
    MEMBER("_provisional", T_OBJECT, provisional), MEMBER("_known", T_OBJECT, known),
    MEMBER("_cut", T_OBJECT, cut),             MEMBER("_inputs", T_OBJECT, inputs),
    MEMBER("_trainable", T_OBJECT, trainable), MEMBER("_outer", T_OBJECT, outer),
    MEMBER("_reserve", T_OBJECT, reserve),     MEMBER("observation", T_OBJECT, observation),
    MEMBER("_away", T_OBJECT, away),           MEMBER("_verdicts", T_OBJECT, verdicts),
    MEMBER("_counts", T_OBJECT, counts),       MEMBER("_places", T_OBJECT, places),
    MEMBER("_free", T_OBJECT, free),           MEMBER("lock", T_OBJECT, lock),
    MEMBER("_budget", T_LONGLONG, budget),     MEMBER("_index", T_LONGLONG, index),
    MEMBER("paused", T_BOOL, paused),          MEMBER("_bits", T_BOOL, bits),
    MEMBER("_numbered", T_BOOL, numbered),     MEMBER("_in_fake_mode", T_BOOL, in_fake_mode), {nullptr}};
#undef MEMBER

void clear_tape(Tape* t) {
  for (PyObject** field : {&t->values, &t->recent, &t->provisional, &t->known, &t->cut, &t->inputs, &t->trainable,
                           &t->outer, &t->reserve, &t->observation, &t->away, &t->verdicts, &t->counts, &t->places,
                           &t->free, &t->lock})
    Py_CLEAR(*field);
}

void dealloc_tape(PyObject* self) {
  clear_tape(reinterpret_cast<Tape*>(self));
  Py_TYPE(self)->tp_free(self);
}

PyObject* new_tape(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* made = type->tp_alloc(type, 0);
  if (made) reinterpret_cast<Tape*>(made)->dtype = c10::typeMetaToScalarType(c10::get_default_dtype());
  return made;
}

// ---------------------------------------------------------------------------------------------------- values of any kind

// Values that the Python tape made are read through their attributes.

bool is_on(PyObject* value, StorageImpl* storage) {
  if (Value* v = native(value)) return v->storage._unsafe_get_target() == storage;
  Ref reference = ATTRIBUTE(value, storage), alive = call(reference.get());
  return THPStorage_Check(alive.get()) && THPStorage_Unpack(alive.get()).unsafeGetStorageImpl() == storage;
}

bool has_node(PyObject* value) {
  if (Value* v = native(value)) return v->node;
  return ATTRIBUTE(value, node).get() != Py_None;
}

int slot_of(PyObject* value) {
  if (Value* v = native(value)) return v->slot;
  return static_cast<int>(PyLong_AsLong(ATTRIBUTE(value, slot).get()));
}

bool is_held(PyObject* value) {
  if (Value* v = native(value)) return v->held.defined() || v->boxed;
  return ATTRIBUTE(value, held).get() != Py_None;
}

Ref debts_of(PyObject* value) {
  if (Value* v = native(value)) return Ref::of(v->debts);
  Ref found = ATTRIBUTE(value, debts);
  return found.get() == Py_None ? Ref() : found;
}

// ---------------------------------------------------------------------------------------------------- tensors

StorageImpl* storage_of(const Tensor& t) { return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); }

bool is_plain(const Tensor& t, bool made = false) {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet unusual({K::Python, K::Conjugate, K::Negative, K::ZeroTensor, K::Functionalize});
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  c10::DispatchKeySet keys = impl->key_set();
  return keys.has(K::Dense) && !keys.has_any(unusual) && impl->layout() == at::kStrided && impl->has_storage() &&
      !impl->has_symbolic_sizes_strides() && (made || !impl->is_inference());
}

// A tensor without history on the same storage, with the same version counter.
Tensor alias_of(const Tensor& t) {
  c10::impl::ExcludeDispatchKeyGuard without_modes(c10::DispatchKey::Python);
  c10::TensorImpl* impl = t.unsafeGetTensorImpl();
  return Tensor::wrap_tensor_impl(
      impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

Tensor origin_of(const Tensor& t) {  // what a view shows
  if (t.is_view()) return Tensor(t._base());
  return t;
}

bool is_nn_parameter(const Tensor& t) {
  Ref object = wrap(t);
  if (reinterpret_cast<PyObject*>(Py_TYPE(object.get())) == py_.Parameter) return true;
  static Name is_param("_is_param");
  if (THPVariable_CheckExact(object.get()) && !attribute_or_null(object.get(), is_param)) return false;
  int found = PyObject_IsInstance(object.get(), py_.Parameter);
  if (found < 0) raise();
  return found;
}

bool is_parameter(const Tensor& t) { return (t.requires_grad() && t.is_leaf()) || is_nn_parameter(t); }

bool same(const Tensor& t, const Geometry& view) {
  return t.scalar_type() == view.dtype && t.storage_offset() == view.offset && t.sizes().equals(view.size()) &&
      t.strides().equals(view.stride());
}

bool is_watched() { return c10::impl::TorchDispatchModeTLS::stack_len() > 0; }

// Below autograd.
Tensor see(const Tensor& base, const Geometry& view) {
  if (same(base, view)) return base;
  if (base.scalar_type() == view.dtype) return at::as_strided(base, view.size(), view.stride(), view.offset);
  return at::empty({0}, base.options().dtype(view.dtype))
      .set_(base.storage(), view.offset, view.size(), view.stride());
}

// The same, where nobody looks on: without the dispatcher if possible.
Tensor see_unwatched(const Tensor& base, const Geometry& view) {
  if (!is_plain(base, true) || base.scalar_type() != view.dtype || same(base, view)) return see(base, view);
  c10::TensorImpl* from = base.unsafeGetTensorImpl();
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), from->key_set(), from->dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(view.size(), view.stride(), view.offset);
  return made;
}

uint64_t numerics() {
  const auto& c = at::globalContext();
  using B = at::Float32Backend;
  using O = at::Float32Op;
  uint64_t key = 0;
  for (auto precision : {c.float32Precision(B::MKLDNN, O::MATMUL), c.float32Precision(B::MKLDNN, O::CONV),
                         c.float32Precision(B::CUDA, O::MATMUL), c.float32Precision(B::CUDA, O::CONV)})
    key = key << 4 | static_cast<uint64_t>(precision);
  for (bool flag : {c.userEnabledMkldnn(), c.deterministicAlgorithms(), c.userEnabledCuDNN(), c.benchmarkCuDNN(),
                    c.deterministicCuDNN()})
    key = key << 1 | static_cast<uint64_t>(flag);
  return key;
}

uint64_t noted_numerics() {
  uint64_t key = numerics();
  Ref& known = all_flags()[key];
  if (!known) known = call(py_.numerics);
  return key;
}

// ---------------------------------------------------------------------------------------------------- holding

Ref key_of(StorageImpl* storage) { return checked(PyLong_FromVoidPtr(storage)); }

Ref found_in(Tape* t, StorageImpl* storage) {
  Ref key = key_of(storage);
  return Ref::of(PyDict_GetItemWithError(t->values, key.get()));
}

void remember(Tape* t, StorageImpl* storage, PyObject* value) {
  if (PyDict_SetItem(t->values, key_of(storage).get(), value) < 0) raise();
}

bool is_in(PyObject* set, StorageImpl* storage) {
  int found = PySet_Contains(set, key_of(storage).get());
  if (found < 0) raise();
  return found;
}

// Calls that are observed, or offload, are recorded by the Python tape alone.
bool is_python(const Tape* t) {
  return (t->observation && t->observation != Py_None) || (t->away && t->away != Py_None);
}

bool has_outer(const Tape* t) { return t->outer && t->outer != Py_None; }

PyObject* as_object(Tape* t) { return reinterpret_cast<PyObject*>(t); }
PyObject* as_object(Value* v) { return reinterpret_cast<PyObject*>(v); }

const Name& holders_name() {
  static Name name("_actmem_holders");
  return name;
}

// `holdings._note_holder`
void note_holder(PyObject* storage, PyObject* value) {
  Ref found = attribute_or_null(storage, holders_name());
  if (!found) {
    auto* made = PyObject_New(Holders, &HoldersType);
    if (!made) raise();
    found = Ref(reinterpret_cast<PyObject*>(made));
    made->most = 8, made->values = PyList_New(0);
    if (!made->values || PyObject_SetAttr(storage, holders_name().text, found.get()) < 0) raise();
  }
  auto* holders = reinterpret_cast<Holders*>(found.get());
  if (Py_TYPE(found.get()) != &HoldersType || PyList_GET_SIZE(holders->values) >= holders->most)
    call(py_.note_holder, storage, value);  // the Python tape's own, or to look for dead ones first
  else if (PyList_Append(holders->values, checked(PyWeakref_NewRef(value, nullptr)).get()) < 0)
    raise();
}

bool has_holders(const Tensor& t) {
  Ref storage = checked(THPStorage_Wrap(t.storage()));
  return bool(attribute_or_null(storage.get(), holders_name()));
}

// `Holdings._hold`
void hold(Tape* t, Value* v, const Tensor& a, bool in_handler) {
  Tensor origin = origin_of(a);
  bool parameter = is_parameter(origin);
  if ((has_outer(t) && !parameter) || !is_plain(origin) || !is_plain(a)) {
    call(in_handler ? py_.hold_in_handler : py_.hold, as_object(t), as_object(v), wrap(a).get());
    return;
  }
  if (v->order < 0) v->order = 0;  // only what is offloaded has an order, and a tape that offloads is Python's
  v->held = parameter ? origin : alias_of(a);
  if (!parameter || !is_nn_parameter(origin)) {
    Ref object = checked(THPStorage_Wrap(v->held.storage()));
    note_holder(object.get(), as_object(v));
  }
  set(v->boxed, nullptr);
  v->version = static_cast<int64_t>(v->held._version());
  if (!v->num_bytes) v->num_bytes = static_cast<int64_t>(storage_of(v->held)->nbytes());
}

bool is_trainable(Tape* t, const Tensor& a, StorageImpl* storage) {
  if (is_in(t->inputs, storage)) return false;
  if (PyAnySet_Check(t->trainable)) return is_in(t->trainable, storage);
  Ref object = checked(THPStorage_Wrap(a.storage()));
  return call(py_.is_trainable, as_object(t), object.get()).get() == Py_True;
}

void note_origin(Value* v, const Tensor& a) {  // weakly: a view may die long before what it shows
  Ref object = wrap(origin_of(a));
  Ref weak = checked(PyWeakref_NewRef(object.get(), nullptr));
  set_seldom(v, &Seldom::tensor, weak.get());
}

// `Holdings._external`
Ref external(Tape* t, const Tensor& a, StorageImpl* storage) {
  Value* v = new_value(storage, nullptr, 0, py_.EXTERNAL);
  Ref value(as_object(v));
  remember(t, storage, value.get());
  t->bits = t->bits || a.is_complex();
  if (origin_of(a).grad_fn() && !is_in(t->inputs, storage)) {
    set(v->why, py_.UNSEEN);
    note_origin(v, a);
    v->num_bytes = static_cast<int64_t>(storage->nbytes());
  } else {
    hold(t, v, a, true);
  }
  return value;
}

// `Holdings._keep_from_dying`
void keep_from_dying(Tape* t, Value* v, const Tensor& a, int64_t num_bytes) {
  v->num_bytes = num_bytes;
  if (num_bytes > t->budget) {
    note_origin(v, a);
    return;
  }
  t->budget -= num_bytes;
  Ref spare = wrap(alias_of(a));
  if (PyList_Append(t->reserve, spare.get()) < 0) raise();
  Ref weak = checked(PyWeakref_NewRef(spare.get(), nullptr));
  set_seldom(v, &Seldom::tensor, weak.get());
  v->reserved = true;
}

// `Holdings._meet`, for the common cases; the others go there.
Ref meet(Tape* t, const Tensor& a, StorageImpl* storage, PyObject* known) {
  if (a.requires_grad() || !is_trainable(t, a, storage)) {
    if (!known || has_node(known)) return external(t, a, storage);
    Value* v = native(known);
    if (v && v->held.defined()) {
      if (v->version == UNCHECKED || static_cast<int64_t>(v->held._version()) == v->version) return Ref::of(known);
      return external(t, a, storage);
    }
    if (v && !v->boxed) {
      if (v->why == py_.CUT) {
        hold(t, v, a, true);
        return Ref::of(known);
      }
      if (v->why == py_.SAVED || v->why == py_.OFFLOADED) {
        if (!v->reserved) keep_from_dying(t, v, a, static_cast<int64_t>(storage->nbytes()));
        return Ref::of(known);
      }
    }
  }
  Ref object = checked(THPStorage_Wrap(a.storage()));
  return call(py_.meet, as_object(t), wrap(a).get(), object.get(), known ? known : Py_None);
}

// `barriers.owe`
Ref owe(Ref debts, const Ref& more) {
  if (!debts || debts.get() == more.get()) return more;
  Ref added = checked(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(more.get()); i++) {
    PyObject* v = PyTuple_GET_ITEM(more.get(), i);
    bool known = false;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(debts.get()) && !known; j++)
      known = PyTuple_GET_ITEM(debts.get(), j) == v;
    if (!known && PyList_Append(added.get(), v) < 0) raise();
  }
  if (!PyList_GET_SIZE(added.get())) return debts;
  Ref tail = checked(PyList_AsTuple(added.get()));
  return checked(PySequence_Concat(debts.get(), tail.get()));
}

// ---------------------------------------------------------------------------------------------------- recording

const Operator* describe(const c10::OperatorHandle& op) {
  static auto* known = new std::unordered_map<c10::OperatorHandle, std::unique_ptr<Operator>>();
  static std::atomic<const Operator*> near[1024];  // those asked for last, by the hash
  auto& here = near[std::hash<c10::OperatorHandle>()(op) / 16 % 1024];
  const Operator* latest = here.load(std::memory_order_acquire);
  if (latest && latest->handle == op) return latest;
  WithGIL gil;
  auto& o = (*known)[op];
  if (!o) {
    auto made = std::make_unique<Operator>(Operator{op});
    made->num_arguments = op.schema().arguments().size(), made->num_returns = op.schema().returns().size();
    made->func = Ref::of(torch::detail::getTorchApiFunction(op).ptr());
    Ref told = call(py_.describe, made->func.get());  // (operator, view, bits, plain, alias, fills, numerics, in_place, dropout)
    auto flag = [&](int i) { return PyObject_IsTrue(PyTuple_GET_ITEM(told.get(), i)) == 1; };
    made->python = Ref::of(PyTuple_GET_ITEM(told.get(), 0));
    made->view = flag(1), made->sets_bits = flag(2), made->plain = flag(3), made->may_alias = flag(4);
    made->fills_saved = flag(5), made->numerics = flag(6), made->in_place = flag(7);
    made->dropout = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(told.get(), 8)));
    o = std::move(made);
  }
  here.store(o.get(), std::memory_order_release);
  return o.get();
}

// Numbers come as tensors that say so, and Python sees them as numbers.
bool is_tensor(const IValue& x) {
  return x.isTensor() && x.toTensor().defined() && !x.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

bool has_listed_number(const IValue* args, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (args[i].isTensorList())
      for (const auto& item : args[i].toListRef())
        if (item.toTensor().defined() && !is_tensor(item)) return true;
  return false;
}

// Calls `f(argument, item, tensor)` for every tensor, in order, until one returns false.
template <class F>
bool each_tensor(const IValue* args, size_t n, F f) {
  for (size_t i = 0; i < n; i++) {
    const IValue& a = args[i];
    if (is_tensor(a)) {
      if (!f(static_cast<int>(i), -1, a.toTensor())) return false;
    } else if (a.isList()) {
      auto items = a.toListRef();
      for (size_t j = 0; j < items.size(); j++)
        if (is_tensor(items[j]) && !f(static_cast<int>(i), static_cast<int>(j), items[j].toTensor())) return false;
    }
  }
  return true;
}

struct WithoutMode {  // as torch does while a mode handles an operator
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode = c10::impl::TorchDispatchModeTLS::pop_stack();
  ~WithoutMode() { c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode)); }
};

// `Holdings._adopt`
void adopt(Tape* t, const IValue* args, size_t n) {
  Ref waiting = Ref::of(t->provisional);
  Ref none = checked(PyList_New(0));
  set(t->provisional, none.get());
  std::vector<Ref> left;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(waiting.get()); i++)
    left.push_back(Ref::of(PyList_GET_ITEM(waiting.get(), i)));
  auto take = [&](PyObject* value, const Tensor& a) {
    if (Value* v = native(value))
      hold(t, v, a, true);
    else
      call(py_.hold_in_handler, as_object(t), value, wrap(a).get());
  };
  each_tensor(args, n, [&](int, int, const Tensor& a) {
    StorageImpl* storage = storage_of(a);
    for (size_t i = 0; i < left.size(); i++) {
      if (!is_on(left[i].get(), storage)) continue;
      take(left[i].get(), a);
      left.erase(left.begin() + static_cast<long>(i));
      break;
    }
    return !left.empty();
  });
  for (auto& value : left) {  // what a Python Function saved comes unchanged
    Ref held = ATTRIBUTE(value.get(), held);
    take(value.get(), THPVariable_Unpack(held.get()));
  }
}

// Why the result of an operator is kept; None if it is recomputed.
PyObject* kept(Tape* t, const Operator* o, const torch::jit::Stack& stack, size_t num_returns) {
  PyObject* decision = PyDict_GetItemWithError(t->known, o->python.get());
  Ref asked;
  if (!decision) {
    Ref outs;
    if (num_returns == 1) {
      outs = Ref(torch::jit::toPyObject(stack.back()).release().ptr());
    } else {
      outs = checked(PyTuple_New(static_cast<Py_ssize_t>(num_returns)));
      for (size_t i = 0; i < num_returns; i++)
        PyTuple_SET_ITEM(outs.get(), i,
                         torch::jit::toPyObject(stack[stack.size() - num_returns + i]).release().ptr());
    }
    static Name decide("decide"), nowhere("");
    Ref address = t->places == Py_None ? Ref::of(nowhere.text) : ATTRIBUTE(as_object(t), address);
    PyObject* asking[] = {t->verdicts, o->python.get(), address.get(), t->counts, outs.get()};
    asked = checked(PyObject_VectorcallMethod(decide.text, asking, 5, nullptr));
    decision = asked.get();
  }
  PyObject* why = decision == py_.RECOMPUTE ? nullptr : decision == py_.SAVE ? py_.SAVED : py_.OFFLOADED;
  if (t->numbered && t->cut && t->cut != Py_None) {  // `Tape._in_cut`: no tape here is observed
    long long index = t->index++;
    Ref funcs = ATTRIBUTE(t->cut, funcs);
    if (index >= PyTuple_GET_SIZE(funcs.get()) || PyTuple_GET_ITEM(funcs.get(), index) != o->func.get()) {
      set(t->cut, Py_None);
    } else {
      Ref held = ATTRIBUTE(t->cut, hold), number = checked(PyLong_FromLongLong(index));
      if (PyObject* cut = PyDict_GetItemWithError(held.get(), number.get())) why = cut;
    }
  }
  return why;
}

Ref record_call(Tape* t, const Operator* o, std::vector<IValue>&& args, Ref& debts) {
  auto* n = PyObject_New(Node, &NodeType);
  if (!n) raise();
  new (&n->args) std::vector<IValue>();
  new (&n->refs) std::vector<Reference>();
  n->several = nullptr;
  n->description = o, n->has_flags = o->numerics, n->flags = 0;
  n->in_place = o->in_place, n->visit = 0;
  new (&n->device) c10::Device(c10::kCPU);
  Ref node(reinterpret_cast<PyObject*>(n));
  size_t num_refs = 0;
  each_tensor(args.data(), args.size(), [&](int, int, const Tensor&) { return ++num_refs; });
  n->refs.reserve(num_refs);
  each_tensor(args.data(), args.size(), [&](int argument, int item, const Tensor& a) {
    StorageImpl* storage = storage_of(a);
    Ref value = found_in(t, storage);
    if (value && !is_on(value.get(), storage)) value = Ref();
    if (!value || !has_node(value.get()) || (a._version() && slot_of(value.get()) >= 0)) {
      value = meet(t, a, storage, value.get());
      if (!is_held(value.get())) debts = owe(std::move(debts), checked(PyTuple_Pack(1, value.get())));
    } else if (Ref more = debts_of(value.get())) {
      debts = owe(std::move(debts), more);
    }
    n->refs.push_back({argument, item, std::move(value), Geometry(a)});
    return true;
  });
  for (auto& r : n->refs) {
    IValue& a = args[r.argument];
    if (a.isNone()) continue;
    if (r.item >= 0) several(n).lists.push_back({r.argument, {a.toListRef().size(), !a.isTensorList()}});
    a = IValue();
  }
  n->args = std::move(args);
  if (o->numerics) n->flags = noted_numerics();
  return node;
}

void record(Tape* t, const Operator* o, std::vector<IValue>&& args,
            const torch::jit::Stack& stack) {
  size_t num_returns = o->num_returns;
  PyObject* why = kept(t, o, stack, num_returns);
  Ref debts, node;
  c10::SmallVector<StorageImpl*, 4> read;
  if (o->may_alias)
    each_tensor(args.data(), args.size(), [&](int, int, const Tensor& a) {
      read.push_back(storage_of(a));
      return true;
    });
  c10::SmallVector<std::pair<int, Tensor>, 4> made;
  int slot = -1;
  each_tensor(stack.data() + stack.size() - num_returns, num_returns, [&](int, int, const Tensor& out) {
    slot++;
    if (!is_plain(out, true)) return true;  // whoever reads it, or saves it, will hold it
    StorageImpl* storage = storage_of(out);
    if (std::find(read.begin(), read.end(), storage) != read.end()) return true;
    Ref known = found_in(t, storage);
    if (known && is_on(known.get(), storage)) return true;  // a view, whatever the schema says
    for (auto& other : made)
      if (storage_of(other.second) == storage) return true;
    made.emplace_back(slot, out);
    return true;
  });
  if (made.empty() && num_returns == 1 && stack.back().isTensor()) return;
  if (!why) node = record_call(t, o, std::move(args), debts);
  if (made.empty()) return;  // numbers, or views: what the call read has been met all the same
  auto* n = reinterpret_cast<Node*>(node.get());
  bool is_one = made.size() == 1 && made[0].first == 0;
  for (auto& [where, out] : made) {
    StorageImpl* storage = storage_of(out);
    Value* v = new_value(storage, node.get(), where, why);
    Ref value(as_object(v));
    if (debts) set(v->debts, debts.get());
    remember(t, storage, value.get());
    if (!is_one && n) several(n).outs.emplace_back(where, checked(PyWeakref_NewRef(value.get(), nullptr)));
  }
}

void forget_recent(Tape* t, const Operator* o) {
  Py_ssize_t n = PyList_GET_SIZE(t->recent);
  if (n && !o->fills_saved) PyList_SetSlice(t->recent, 0, n, nullptr);
}

bool is_filling(const Value* v) { return v->seldom && (v->seldom->coverage || v->seldom->pending); }

// What an operator in place is about to overwrite, if this file knows what to do: recorded here, and held by nobody.
Ref overwritten(Tape* t, const Operator* o, const IValue* args) {
  if (!is_tensor(args[0])) return Ref();
  const Tensor& a = args[0].toTensor();
  StorageImpl* storage = storage_of(a);
  Ref old = found_in(t, storage);
  Value* v = old ? native(old.get()) : nullptr;
  if (!v || !is_on(old.get(), storage) || !v->node || v->held.defined() || v->boxed || is_filling(v) ||
      (v->slot >= 0 && a._version()) || PyList_GET_SIZE(t->recent) || has_holders(a))
    return Ref();
  if (PyDict_GetItemWithError(t->known, o->python.get()) != py_.RECOMPUTE) return Ref();
  if (t->numbered && t->cut && t->cut != Py_None) {
    Ref funcs = ATTRIBUTE(t->cut, funcs), held = ATTRIBUTE(t->cut, hold);
    Ref number = checked(PyLong_FromLongLong(t->index));
    if (t->index >= PyTuple_GET_SIZE(funcs.get()) || PyTuple_GET_ITEM(funcs.get(), t->index) != o->func.get() ||
        PyDict_GetItemWithError(held.get(), number.get()))
      return Ref();
    t->index++;
  }
  return old;
}

// The new version of a storage that an operator wrote in place.
void record_version(Tape* t, const Tensor& a, Ref node, const Ref& debts) {
  auto* n = reinterpret_cast<Node*>(node.get());
  n->device = a.device();
  Value* v = new_value(storage_of(a), node.get(), -1, nullptr);
  Ref value(as_object(v));
  if (debts) set(v->debts, debts.get());
  several(n).outs.emplace_back(-1, checked(PyWeakref_NewRef(value.get(), nullptr)));
  remember(t, storage_of(a), value.get());
}

struct Interpreter final : c10::impl::PyInterpreterVTable {
  const c10::impl::PyInterpreterVTable* theirs = nullptr;

  static Tape* top() {  // the tape, if it is the innermost mode
    using Stack = c10::impl::TorchDispatchModeTLS;
    int64_t n = Stack::stack_len();
    if (!n) return nullptr;
    PyObject* mode = Stack::get_stack_at(n - 1)->ptr(getPyInterpreter());
    static std::atomic<PyTypeObject*> latest = nullptr;  // there is one subclass
    PyTypeObject* kind = Py_TYPE(mode);
    if (kind != latest.load(std::memory_order_relaxed)) {
      if (!PyType_IsSubtype(kind, &TapeType)) return nullptr;
      latest.store(kind, std::memory_order_relaxed);
    }
    return reinterpret_cast<Tape*>(mode);
  }

  static bool in_fake_mode() {
    using namespace c10::impl;
    return TorchDispatchModeTLS::stack_len() > 1 && TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE);
  }

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override {
    Tape* t = top();
    if (!t || is_python(t) || t->in_fake_mode || in_fake_mode()) return theirs->dispatch(op, stack);
    const Operator* o = describe(op);
    size_t n = o->num_arguments;
    const IValue* args = stack->data() + stack->size() - n;
    bool pure = o->plain || o->in_place || (o->dropout >= 0 && args[o->dropout].isDouble() && args[o->dropout].toDouble() == 0);
    bool simple = o->view || (pure && (t->paused || c10::typeMetaToScalarType(c10::get_default_dtype()) == t->dtype));
    if (!simple || has_listed_number(args, n) ||
        !each_tensor(args, n, [&](int, int, const Tensor& a) {
          return o->view || t->paused ? !a.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Python)
                                      : is_plain(a);
        }))
      return theirs->dispatch(op, stack);
    if (o->view || t->paused) {
      if (o->sets_bits) t->bits = true;
      WithoutMode on_its_own;
      return op.callBoxed(stack);
    }
    WithoutMode on_its_own;
    if (PyList_GET_SIZE(t->provisional)) {
      WithGIL gil;
      adopt(t, args, n);
    }
    if (o->in_place) {
      if (write(t, op, o, stack, n)) return;
      c10::impl::TorchDispatchModeTLS::push_non_infra_mode_onto_stack(on_its_own.mode);
      auto back = c10::make_scope_exit([] { c10::impl::TorchDispatchModeTLS::pop_stack(); });
      return theirs->dispatch(op, stack);
    }
    std::vector<IValue> given(args, args + n);
    op.callBoxed(stack);
    WithGIL gil;
    forget_recent(t, o);
    record(t, o, std::move(given), *stack);
    given.clear();
  }

  // Record and run an operator in place; false if Python has to.
  static bool write(Tape* t, const c10::OperatorHandle& op, const Operator* o, torch::jit::Stack* stack, size_t n) {
    Ref node, debts;
    const IValue* args = stack->data() + stack->size() - n;
    Tensor written;
    {
      WithGIL gil;
      forget_recent(t, o);
      if (Ref old = overwritten(t, o, args)) {
        written = args[0].toTensor();
        node = record_call(t, o, std::vector<IValue>(args, args + n), debts);
        if (PyDict_DelItem(t->values, key_of(storage_of(written)).get()) < 0) raise();
        set_seldom(native(old.get()), &Seldom::tensor, nullptr);  // `holding_rules.preserve`, for what nobody holds
      }
    }
    if (!written.defined()) return false;
    try {
      op.callBoxed(stack);
    } catch (...) {
      WithGIL gil;
      node = debts = Ref();
      throw;
    }
    WithGIL gil;
    record_version(t, written, std::move(node), debts);
    debts = Ref();
    return true;
  }

  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* self) const override {
    if (!top() || self->key_set().has(c10::DispatchKey::Python)) return theirs->detach(self);
    if (c10::impl::TorchDispatchModeTLS::stack_len() == 1) return nullptr;  // torch copies it itself
    WithoutMode others_see_it;
    return self->shallow_copy_and_detach(c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true);
  }

#define THEIRS(result, name, parameters, arguments) \
  result name parameters const override { return theirs->name arguments; }
  THEIRS(std::string, name, (), ())
  THEIRS(void, incref, (PyObject * o), (o))
  THEIRS(void, decref, (PyObject * o), (o))
  THEIRS(bool, try_incref, (const c10::impl::PyObjectSlot& s), (s))
  THEIRS(size_t, refcnt, (PyObject * o), (o))
  THEIRS(void, reportErrorCallback, (PyObject * f, c10::DispatchKey k), (f, k))
  THEIRS(void, python_op_registration_trampoline,
         (const c10::OperatorHandle& op, c10::DispatchKey k, c10::DispatchKeySet ks, torch::jit::Stack* s, bool a,
          bool b),
         (op, k, ks, s, a, b))
  THEIRS(void, throw_abstract_impl_not_imported_error, (std::string n, const char* m, const char* c), (n, m, c))
  THEIRS(void, python_dispatcher, (const c10::OperatorHandle& op, c10::DispatchKeySet ks, torch::jit::Stack* s),
         (op, ks, s))
  using T = const c10::TensorImpl*;
  THEIRS(bool, is_contiguous, (T t, at::MemoryFormat f), (t, f))
  THEIRS(c10::SymBool, sym_is_contiguous, (T t, at::MemoryFormat f), (t, f))
  THEIRS(bool, is_strides_like, (T t, at::MemoryFormat f), (t, f))
  THEIRS(bool, is_non_overlapping_and_dense, (T t), (t))
  THEIRS(c10::Device, device, (T t), (t))
  THEIRS(int64_t, dim, (T t), (t))
  THEIRS(c10::IntArrayRef, strides, (T t), (t))
  THEIRS(c10::IntArrayRef, sizes, (T t), (t))
  THEIRS(c10::SymIntArrayRef, sym_sizes, (T t), (t))
  THEIRS(c10::Layout, layout, (T t), (t))
  THEIRS(int64_t, numel, (T t), (t))
  THEIRS(c10::SymInt, sym_numel, (T t), (t))
  THEIRS(c10::SymIntArrayRef, sym_strides, (T t), (t))
  THEIRS(c10::SymInt, sym_storage_offset, (T t), (t))
  using D = c10::DeviceType;
  using P = uintptr_t;
  THEIRS(void, trace_gpu_event_creation, (D d, P a), (d, a))
  THEIRS(void, trace_gpu_event_deletion, (D d, P a), (d, a))
  THEIRS(void, trace_gpu_event_record, (D d, P a, P b), (d, a, b))
  THEIRS(void, trace_gpu_event_wait, (D d, P a, P b), (d, a, b))
  THEIRS(void, trace_gpu_memory_allocation, (D d, P a), (d, a))
  THEIRS(void, trace_gpu_memory_deallocation, (D d, P a), (d, a))
  THEIRS(void, trace_gpu_stream_creation, (D d, P a), (d, a))
  THEIRS(void, trace_gpu_device_synchronization, (D d), (d))
  THEIRS(void, trace_gpu_stream_synchronization, (D d, P a), (d, a))
  THEIRS(void, trace_gpu_event_synchronization, (D d, P a), (d, a))
  THEIRS(void, reset_backward_hooks, (T t), (t))
#undef THEIRS
};

// Have this file answer while a tape of its own is the innermost mode. For good: the table is never destroyed.
void install() {
  static auto* table = [] {
    auto* made = new Interpreter();
    made->theirs = getPyInterpreter()->vtable_;
    return made;
  }();
  getPyInterpreter()->vtable_ = table;
}

// ---------------------------------------------------------------------------------------------------- saving

void hold_saved(Tape* t, Value* v, const Tensor& shown, PyObject* object) {
  if (shown.grad_fn() || has_outer(t)) return hold(t, v, shown, false);
  if (v->order < 0) v->order = 0;
  v->held = shown;  // a leaf, or a copy of one: see `Holdings._adopt`
  if (PyList_Append(t->provisional, as_object(v)) < 0) raise();
}

// `barriers.settle`, where this file made everything that is owed.
void settle(Tape* t, Value* v, const Tensor& shown, PyObject* object) {
  Ref debts = Ref::of(v->debts);
  auto num_bytes = static_cast<int64_t>(storage_of(shown)->nbytes());
  c10::SmallVector<std::pair<Value*, Tensor>, 4> found;
  int64_t owed_bytes = 0;
  bool gone = false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(debts.get()); i++) {
    Value* owed = native(PyTuple_GET_ITEM(debts.get(), i));
    if (owed && is_held(as_object(owed))) continue;
    PyObject* alive = owed && owed->seldom && owed->seldom->tensor ? PyWeakref_GetObject(owed->seldom->tensor) : Py_None;
    if (!owed || (alive != Py_None && !is_plain(THPVariable_Unpack(alive)))) {
      call(py_.settle, as_object(t), as_object(v), checked(PyLong_FromLongLong(num_bytes)).get(), object);
      return;
    }
    if (alive == Py_None || storage_of(THPVariable_Unpack(alive)) != owed->storage._unsafe_get_target())
      gone = true;
    else
      found.emplace_back(owed, THPVariable_Unpack(alive));
    if (PySequence_Contains(t->free, owed->why ? owed->why : Py_None) != 1) owed_bytes += owed->num_bytes;
  }
  if (gone || owed_bytes > num_bytes) {
    hold(t, v, shown, false);
    set(v->why, py_.BARRIER);
    release_chain(std::exchange(v->node, nullptr));
  } else {
    for (auto& [owed, alive] : found) hold(t, owed, alive, false);
  }
  set(v->debts, nullptr);
}

PyObject* pack(PyObject* self, PyObject* object) {
  return guarded([&]() -> PyObject* {
    auto* t = reinterpret_cast<Tape*>(self);
    const Tensor& shown = THPVariable_Unpack(object);
    if (is_python(t) || !is_plain(shown) || has_outer(t)) return call(py_.pack, self, object).release();
    StorageImpl* storage = storage_of(shown);
    Ref value = found_in(t, storage);
    Value* v = value ? native(value.get()) : nullptr;
    bool known = value && is_on(value.get(), storage);
    if (known && !v) return call(py_.pack, self, object).release();
    if (!known || (v->node && v->slot >= 0 && shown._version() != 0) ||
        (v->held.defined() && v->version != UNCHECKED && static_cast<int64_t>(v->held._version()) != v->version)) {
      v = new_value(storage, nullptr, 0, py_.EXTERNAL);
      value = Ref(as_object(v));
      remember(t, storage, value.get());
      t->bits = t->bits || shown.is_complex();
      hold_saved(t, v, shown, object);
    } else if (!v->held.defined() && !v->boxed) {
      if (!v->node)
        hold_saved(t, v, shown, object);
      else if (v->debts)
        settle(t, v, shown, object);
    }
    auto* h = PyObject_New(Handle, &HandleType);
    if (!h) raise();
    new (&h->view) Geometry(shown);
    h->tape = Py_NewRef(self), h->value = value.release(), h->checksum = nullptr;
    Ref handle(reinterpret_cast<PyObject*>(h));
    if (!v->saved) {
      v->saved = true;
      t->budget += static_cast<long long>(storage->nbytes());
    }
    if (!shown.requires_grad() && PyList_Append(t->recent, handle.get()) < 0) raise();
    return handle.release();
  });
}

// ---------------------------------------------------------------------------------------------------- opening

// The bytes of a value, or undefined if Python has to look.
Tensor intact(PyObject* value) {
  Value* v = native(value);
  if (!v) {
    Ref found = call(py_.held, value);  // raises what there is to raise
    return THPVariable_Check(found.get()) ? THPVariable_Unpack(found.get()) : Tensor();
  }
  const Tensor& base = v->held;
  if (!base.defined()) return Tensor();
  bool whole = !v->num_bytes || (v->version == UNCHECKED && v->own) || base.layout() != at::kStrided ||
      static_cast<int64_t>(storage_of(base)->nbytes()) >= v->num_bytes;
  if (!whole || (v->version != UNCHECKED && static_cast<int64_t>(base._version()) != v->version))
    call(py_.held, value);
  return base;
}

using Order = std::vector<std::pair<Ref, Ref>>;  // value, node

// The values that a node of the Python tape reads.
std::vector<Ref> read_by(PyObject* node) {
  std::vector<Ref> found;
  Ref refs = ATTRIBUTE(node, refs);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(refs.get()); i++) {
    PyObject* value = PyTuple_GET_ITEM(PyList_GET_ITEM(refs.get(), i), 2);
    if (value != Py_None) found.push_back(Ref::of(value));
  }
  return found;
}

Ref node_of(PyObject* value) {
  if (Value* v = native(value)) return Ref::of(v->node);
  Ref found = ATTRIBUTE(value, node);
  return found.get() == Py_None ? Ref() : found;
}

bool is_boxed(PyObject* value) {
  if (Value* v = native(value)) return v->boxed;
  Ref held = ATTRIBUTE(value, held);
  return held.get() != Py_None && !THPVariable_Check(held.get());
}

// `holding_rules.replay_order`; false if Python has to do it.
bool replay_order(PyObject* value, Order& order) {
  struct Frame {
    Ref value, node;
    std::vector<Ref> reads;  // of a node of the Python tape
    size_t next = 0;

    PyObject* read() {
      if (Py_TYPE(node.get()) != &NodeType) return next < reads.size() ? reads[next++].get() : nullptr;
      auto& refs = reinterpret_cast<Node*>(node.get())->refs;
      return next < refs.size() ? refs[next++].value.get() : nullptr;
    }
  };
  static uint64_t visits = 0;
  uint64_t visit = ++visits;
  std::vector<Frame> stack;
  stack.reserve(16);
  order.reserve(64);
  std::unordered_set<PyObject*> seen;
  auto is_new = [&](PyObject* node) {
    if (Py_TYPE(node) != &NodeType) return seen.insert(node).second;
    return std::exchange(reinterpret_cast<Node*>(node)->visit, visit) != visit;
  };
  auto push = [&](PyObject* v, Ref node) {
    std::vector<Ref> reads;
    if (Py_TYPE(node.get()) != &NodeType) reads = read_by(node.get());
    stack.push_back({Ref::of(v), std::move(node), std::move(reads)});
  };
  Ref first = node_of(value);
  if (!first) return false;
  is_new(first.get());
  push(value, std::move(first));
  while (!stack.empty()) {
    bool deeper = false;
    while (PyObject* parent = stack.back().read()) {
      if (is_held(parent)) {
        if (is_boxed(parent)) return false;
        continue;
      }
      Ref node = node_of(parent);
      if (!node) return false;
      if (!is_new(node.get())) continue;
      push(parent, std::move(node));
      deeper = true;
      break;
    }
    if (deeper) continue;
    order.emplace_back(std::move(stack.back().value), std::move(stack.back().node));
    stack.pop_back();
  }
  std::reverse(order.begin(), order.end());
  return true;
}

void made(Value* v, Tensor held) {
  if (held.is_conj() || held.is_neg()) held = THPVariable_Unpack(call(py_.without_bits, wrap(held).get()).get());
  v->held = std::move(held), v->own = true;
  set(v->boxed, nullptr);
  set(v->debts, nullptr);
  release_chain(std::exchange(v->node, nullptr));
}

// Run one recorded operator, and leave the results in the values that can still be reached.
void run(Node* n, Value* wanted) {
  torch::jit::Stack stack;
  stack.reserve(std::max(n->args.size(), n->description->num_returns));
  stack.assign(n->args.begin(), n->args.end());
  if (n->several)
    for (auto& [argument, list] : n->several->lists) {
      if (list.second) {
        c10::List<std::optional<Tensor>> items;
        items.resize(list.first);
        stack[argument] = std::move(items);
      } else {
        c10::List<Tensor> items;
        items.resize(list.first);
        stack[argument] = std::move(items);
      }
    }
  // The call must write and read a written value in one place: its tensors may share a storage.
  PyObject* written = n->in_place ? n->refs[0].value.get() : nullptr;
  bool watched = written || is_watched();
  int64_t num_elements = 0;
  Tensor fresh;
  if (written) {
    auto num_refs = std::count_if(n->refs.begin(), n->refs.end(), [&](auto& r) { return r.value.get() == written; });
    Value* v = native(written);
    fresh = intact(written);
    if (!(v && v->own && Py_REFCNT(written) <= num_refs))  // `holding_rules.written_in_place`
      fresh = THPVariable_Unpack(call(py_.copied, wrap(fresh).get()).get());
  }
  for (auto& r : n->refs) {
    Tensor base = r.value.get() == written && written ? fresh : intact(r.value.get());
    num_elements += c10::multiply_integers(r.view.size());
    TORCH_CHECK(base.defined(), "nothing holds a value that a replay needs. This is a defect of actmem: please report it.");
    Tensor tensor = watched ? see(base, r.view) : see_unwatched(base, r.view);
    if (r.item < 0)
      stack[r.argument] = std::move(tensor);
    else if (stack[r.argument].isTensorList())
      stack[r.argument].toTensorList().set(r.item, std::move(tensor));
    else
      stack[r.argument].toOptionalTensorList().set(r.item, std::move(tensor));
  }
  if (num_elements < 16384) {  // done before another thread could take over
    n->description->handle.callBoxed(&stack);
  } else {
    WithoutGIL others_may_run;
    n->description->handle.callBoxed(&stack);
  }
  if (written) return made(wanted, stack.back().toTensor());
  int slot = -1;
  size_t next = 0;
  each_tensor(stack.data(), stack.size(), [&](int, int, const Tensor& out) {
    slot++;
    if (!n->several || n->several->outs.empty()) {
      made(wanted, out);
      return false;
    }
    auto& outs = n->several->outs;
    if (next < outs.size() && outs[next].first == slot) {
      PyObject* value = PyWeakref_GetObject(outs[next++].second.get());
      Value* v = value == Py_None ? nullptr : native(value);
      if (v && v->node == reinterpret_cast<PyObject*>(n)) made(v, out);
    }
    return true;
  });
}

struct Replaying {
  Replaying() { call(py_.enter); }
  ~Replaying() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(py_.leave));
    PyErr_Restore(type, value, trace);
  }
};

struct Locked {
  Ref lock;
  explicit Locked(PyObject* tape) : lock(Ref::of(reinterpret_cast<Tape*>(tape)->lock)) {
    static Name acquire("acquire");
    checked(PyObject_CallMethodNoArgs(lock.get(), acquire.text));
  }
  ~Locked() {
    static Name release("release");
    Py_XDECREF(PyObject_CallMethodNoArgs(lock.get(), release.text));
  }
};

// `replay._materialise`; false if Python has to do it.
bool materialise(PyObject* value) {
  Order order;
  if (!replay_order(value, order)) return false;
  std::optional<Replaying> told;  // only a dispatch mode can ask, or Python code that a node calls
  if (is_watched()) told.emplace();
  at::AutoDispatchBelowAutograd below;
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  while (!order.empty()) {
    auto [wanted, node] = std::move(order.back());
    order.pop_back();
    if (node_of(wanted.get()).get() != node.get()) continue;  // an earlier node of this chain made it
    Value* v = native(wanted.get());
    auto* n = reinterpret_cast<Node*>(node.get());
    if (v && Py_TYPE(node.get()) == &NodeType && (!n->has_flags || n->flags == numerics())) {
      run(n, v);
    } else {
      if (!told) told.emplace();
      call(py_.run, node.get(), wanted.get());
    }
  }
  return true;
}

bool asked_by_function() {
  auto node = torch::autograd::get_current_node();
  if (!node) return false;
  const torch::autograd::Node& running = *node;
  if (std::strstr(typeid(running).name(), "PyNode") == nullptr) return false;
  return call(py_.asked_by_function).get() == Py_True;
}

PyObject* unpack(PyObject*, PyObject* packed) {
  return guarded([&]() -> PyObject* {
    auto* h = reinterpret_cast<Handle*>(packed);
    Value* v = Py_TYPE(packed) == &HandleType ? native(h->value) : nullptr;
    if (!v || (h->checksum && h->checksum != Py_None)) return call(py_.unpack, packed).release();
    if (!v->held.defined() && !v->boxed) {
      Locked lock(h->tape);
      if (!v->held.defined() && !v->boxed && !materialise(h->value)) return call(py_.unpack, packed).release();
    }
    if (v->boxed) return call(py_.unpack, packed).release();
    Tensor base = intact(h->value);
    if (Py_REFCNT(h->value) > 1 && asked_by_function()) return call(py_.unpack, packed).release();
    if (same(base, h->view)) {
      Ref object = wrap(base);
      if (!THPVariable_CheckExact(object.get()) && PyObject_IsInstance(object.get(), py_.Parameter) == 1)
        call(py_.opened_parameter, object.get());
      return object.release();
    }
    at::AutoDispatchBelowAutograd below;
    return wrap(is_watched() ? see(base, h->view) : see_unwatched(base, h->view)).release();
  });
}

// ---------------------------------------------------------------------------------------------------- the module

PyMethodDef tape_methods[] = {
    {"pack", pack, METH_O, nullptr}, {nullptr}};

PyTypeObject ValueType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject NodeType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject HandleType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject HoldersType = {PyVarObject_HEAD_INIT(nullptr, 0)};
PyTypeObject TapeType = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* configure(PyObject*, PyObject* given) {
#define TAKE(name)                                                        \
  py_.name = PyDict_GetItemString(given, #name);                          \
  if (!py_.name) return PyErr_Format(PyExc_KeyError, "%s is missing", #name); \
  Py_INCREF(py_.name);
  TAKE(describe) TAKE(meet) TAKE(hold_in_handler) TAKE(hold) TAKE(pack) TAKE(settle)
  TAKE(note_holder) TAKE(is_trainable) TAKE(unpack) TAKE(run) TAKE(enter) TAKE(leave) TAKE(held)
  TAKE(asked_by_function) TAKE(opened_parameter) TAKE(without_bits) TAKE(numerics) TAKE(copied) TAKE(Parameter) TAKE(RECOMPUTE)
  TAKE(SAVE) TAKE(SAVED) TAKE(OFFLOADED) TAKE(CUT) TAKE(EXTERNAL) TAKE(BARRIER) TAKE(UNSEEN) TAKE(nothing)
#undef TAKE
  install();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"configure", configure, METH_O, nullptr}, {"unpack", unpack, METH_O, nullptr}, {nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "actmem_core", nullptr, -1, functions};

bool ready(PyObject* module, PyTypeObject& type, const char* name, size_t size, destructor dealloc) {
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_dealloc = dealloc;
  type.tp_flags |= Py_TPFLAGS_DEFAULT;
  if (PyType_Ready(&type) < 0) return false;
  return PyModule_AddObjectRef(module, std::strrchr(name, '.') + 1, reinterpret_cast<PyObject*>(&type)) == 0;
}

}  // namespace

PyMODINIT_FUNC PyInit_actmem_core() {
  PyObject* module = PyModule_Create(&definition);
  if (!module) return nullptr;
  ValueType.tp_weaklistoffset = offsetof(Value, weak);
  ValueType.tp_getset = value_attributes;
  ValueType.tp_methods = value_methods;
  NodeType.tp_getset = node_attributes;
  HandleType.tp_members = handle_members;
  HandleType.tp_getset = handle_attributes;
  HoldersType.tp_members = holders_members;
  TapeType.tp_members = tape_members;
  TapeType.tp_methods = tape_methods;
  TapeType.tp_new = new_tape;
  TapeType.tp_flags = Py_TPFLAGS_BASETYPE;
  if (!ready(module, ValueType, "actmem_core.Value", sizeof(Value), dealloc_value) ||
      !ready(module, NodeType, "actmem_core.Node", sizeof(Node), dealloc_node) ||
      !ready(module, HandleType, "actmem_core.Handle", sizeof(Handle), dealloc_handle) ||
      !ready(module, HoldersType, "actmem_core.Holders", sizeof(Holders), dealloc_holders) ||
      !ready(module, TapeType, "actmem_core.Tape", sizeof(Tape), dealloc_tape)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
