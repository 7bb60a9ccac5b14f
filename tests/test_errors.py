"""Every bad input named in the design raises ours, naming the argument, what was got, the remedy."""

import pytest
import torch

import tilewise as tw

A, B = torch.randn(6, 4), torch.randn(6, 4)
INT = torch.arange(6)

BAD = {
    "feature size": (lambda: tw.clip_loss(A, torch.randn(6, 5), 1.0), tw.ShapeError, "image and text.*4 and 5.*project"),
    "one dimension": (lambda: tw.info_nce(A[0], B, 1.0), tw.ShapeError, r"query must have 2 dimensions.*\(4,\)"),
    "three dimensions": (lambda: tw.nt_xent(A[None], B[None]), tw.ShapeError, "first must have 2"),
    "empty": (lambda: tw.siglip_loss(A[:0], B, 1.0), tw.ShapeError, "image must not be empty"),
    "unpaired": (lambda: tw.clip_loss(A, B[:5], 1.0), tw.ShapeError, "6 and 5 rows.*info_nce"),
    "views unpaired": (lambda: tw.nt_xent(A, B[:5]), tw.ShapeError, "two views.*6 and 5"),
    "integer features": (lambda: tw.clip_loss(A.long(), B, 1.0), tw.DtypeError, "image must be float64.*int64.*cast"),
    "list features": (lambda: tw.clip_loss([[1.0]], B, 1.0), tw.DtypeError, "image must be a tensor, got list"),
    "sparse features": (lambda: tw.clip_loss(A.to_sparse(), B, 1.0), tw.DtypeError, "image must be dense.*to_dense"),
    "nested features": (lambda: tw.clip_loss(torch.nested.nested_tensor([A[0]], layout=torch.jagged), B, 1.0), tw.DtypeError, "image must be dense"),
    "array to explain": (lambda: tw.explain_backend(A.numpy()), tw.DtypeError, "features must be a tensor, got ndarray"),
    "nothing to keep": (lambda: tw.explain_keep(A, None), tw.DtypeError, "cols must be a tensor, got NoneType"),
    "mixed dtypes": (lambda: tw.clip_loss(A, B.bfloat16(), 1.0), tw.DtypeError, "float32 and torch.bfloat16.*autocast"),
    "mixed devices": (lambda: tw.clip_loss(A, B.to("meta"), 1.0), tw.DeviceError, "text must be on the device of image"),
    "scale shape": (lambda: tw.clip_loss(A, B, torch.ones(6)), tw.ShapeError, r"scale must hold one number.*\(6,\).*weight"),
    "scale dtype": (lambda: tw.clip_loss(A, B, torch.tensor(3)), tw.DtypeError, "scale must be a floating tensor.*int64"),
    "scale text": (lambda: tw.clip_loss(A, B, "10"), tw.DtypeError, "scale must be a number or a tensor, got str"),
    "scale infinite": (lambda: tw.clip_loss(A, B, float("inf")), tw.OptionError, "scale must be finite, got inf"),
    "scale nan on cpu": (lambda: tw.clip_loss(A, B, torch.tensor(torch.nan)), tw.OptionError, "scale must be finite, got nan"),
    "scale device": (lambda: tw.clip_loss(A, B, torch.ones((), device="meta")), tw.DeviceError, "scale must be on the device"),
    "bias nan on cpu": (lambda: tw.siglip_loss(A, B, 1.0, torch.tensor(torch.inf)), tw.OptionError, "bias must be finite"),
    "scale and temperature": (lambda: tw.clip_loss(A, B, 1.0, temperature=1.0), tw.OptionError, "pass one of them"),
    "temperature zero": (lambda: tw.nt_xent(A, B, temperature=0.0), tw.OptionError, "temperature must be above 0, got 0.0"),
    "weight shape": (lambda: tw.clip_loss(A, B, 1.0, weight=torch.ones(5)), tw.ShapeError, r"weight must have shape \(6,\).*\(5,\)"),
    "weight dtype": (lambda: tw.clip_loss(A, B, 1.0, weight=INT), tw.DtypeError, "weight must be float64.*int64"),
    "ids dtype": (lambda: tw.clip_loss(A, B, 1.0, ids=A[:, 0]), tw.DtypeError, "row ids must be an integer tensor.*float32"),
    "ids length": (lambda: tw.clip_loss(A, B, 1.0, ids=INT[:5]), tw.ShapeError, r"row ids.*\(6,\).*\(5,\)"),
    "ids rectangular": (lambda: tw.info_nce(A, B[:5], 1.0, ids=INT), tw.ShapeError, r"6 and 5; pass a tuple \(row ids, column ids\)"),
    "ids list": (lambda: tw.clip_loss(A, B, 1.0, ids=[1, 2, 3]), tw.DtypeError, "ids must be a tensor or a tuple of two"),
    "labels device": (lambda: tw.sup_con(A, INT.to("meta")), tw.DeviceError, "labels must be on the device of the features \\(cpu\\), got meta; move it with .to"),
    "labels and index": (lambda: tw.info_nce(A, B, 1.0, labels=INT, positives=INT), tw.OptionError, "pass one"),
    "index length": (lambda: tw.info_nce(A, B, 1.0, positives=INT[:5]), tw.ShapeError, "positives must have one entry"),
    "index above": (lambda: tw.info_nce(A, B, 1.0, positives=INT + 1), tw.OptionError, r"positives must lie in \[0, 6\).*got 6 at row 5"),
    "index below": (lambda: tw.info_nce(A, B, 1.0, positives=INT - 2), tw.OptionError, "got -2 at row 0"),
    "index text": (lambda: tw.info_nce(A, B, 1.0, positives="diagonal"), tw.OptionError, "positives must be 'aligned' or an index tensor \\(6,\\), got 'diagonal'"),
    "index list": (lambda: tw.info_nce(A, B, 1.0, positives=[0, 1]), tw.OptionError, r"an index tensor \(6,\), got \[0, 1\]"),
    "index array": (lambda: tw.info_nce(A, B, 1.0, positives=INT.numpy()), tw.OptionError, r"an index tensor \(6,\)"),
    "index not mutual": (
        lambda: tw.reduce_pairs(A, None, positives=torch.tensor([1, 2, 0, 4, 3, 5]), skip_self=True), tw.OptionError, "in mutual pairs.*got 1 at row 0"),
    "index for columns": (lambda: tw.reduce_pairs(A, B, positives=INT), tw.OptionError, "columns=True needs"),
    "aligned self": (lambda: tw.reduce_pairs(A, B, skip_self=True), tw.OptionError, "skip_self=True leaves out"),
    "negatives shape": (lambda: tw.info_nce(A, B, 1.0, negatives=A[0]), tw.ShapeError, r"negatives must be a tensor \(K, D\)"),
    "negatives rows": (lambda: tw.info_nce(A, B, 1.0, negatives=torch.randn(5, 2, 4)), tw.ShapeError, "each of the 6 queries, got 5"),
    "negatives size": (lambda: tw.info_nce(A, B, 1.0, negatives=torch.randn(5, 3)), tw.ShapeError, "query and negatives must share"),
    "negative ids alone": (lambda: tw.info_nce(A, B, 1.0, negative_ids=INT), tw.OptionError, "negatives, which were not given"),
    "negative ids without ids": (
        lambda: tw.info_nce(A, B, 1.0, negatives=A, negative_ids=INT), tw.OptionError, "pass ids too"),
    "negative ids shape": (
        lambda: tw.info_nce(A, B, 1.0, negatives=A, negative_ids=INT[:5], ids=INT), tw.ShapeError, r"negative_ids must have one entry.*\(6,\).*\(5,\)"),
    "smoothing tensor": (lambda: tw.clip_loss(A, B, 1.0, label_smoothing=torch.ones(())), tw.DtypeError, "label_smoothing must be a number, got Tensor"),
    "reduction list": (lambda: tw.clip_loss(A, B, 1.0, reduction=["mean"]), tw.OptionError, "reduction must be one of"),
    "smoothing": (lambda: tw.clip_loss(A, B, 1.0, label_smoothing=1.0), tw.OptionError, "label_smoothing must be at least 0 and below 1"),
    "reduction": (lambda: tw.clip_loss(A, B, 1.0, reduction="avg"), tw.OptionError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
    "sweep reduction": (lambda: tw.reduce_pairs(A, B, reduction="max"), tw.OptionError, "'logsumexp', 'softplus'"),
    "backend": (lambda: tw.clip_loss(A, B, 1.0, backend="cuda"), tw.OptionError, "backend must be one of 'auto'.*got 'cuda'"),
    "backend refused": (lambda: tw.clip_loss(A, B, 1.0, backend="fused"), tw.BackendError, "'fused' cannot run: it needs a CUDA.*backend='auto'"),
    "workspace": (lambda: tw.clip_loss(A, B, 1.0, workspace_mib=0), tw.OptionError, "workspace_mib must be positive, got 0"),
    "precision": (lambda: tw.clip_loss(A, B, 1.0, precision="tf32"), tw.OptionError, "precision must be one of 'exact', 'fp8', got 'tf32'"),
    "precision refused": (
        lambda: tw.clip_loss(A.half(), B.half(), 1.0, precision="fp8"), tw.OptionError, "precision='fp8' cannot be had: it needs a CUDA device, got cpu; leave precision at 'exact'"),
    "unknown option": (lambda: tw.clip_loss(A, B, 1.0, workspace=1), tw.OptionError, "unknown option 'workspace'.*workspace_mib"),
    "softplus on itself": (lambda: tw.reduce_pairs(A, None, positives=None, reduction="softplus"), tw.OptionError, "needs columns of its own.*cols=rows"),
    "two ids on itself": (lambda: tw.reduce_pairs(A, None, positives=None, ids=(INT, INT)), tw.OptionError, "ids must be one tensor where the columns are the rows"),
    "two labels on itself": (lambda: tw.sup_con(A, (INT, INT)), tw.DtypeError, "labels must be an integer tensor, got tuple"),
    "no labels": (lambda: tw.sup_con(A, None), tw.DtypeError, "labels must be an integer tensor, got NoneType"),
    "no positives": (lambda: tw.info_nce(A, B, 1.0, positives=None), tw.OptionError, "positives must be 'aligned' or an index"),
    "no positives in siglip": (lambda: tw.siglip_loss(A, B, 1.0, positives=None), tw.OptionError, "positives must be 'aligned' or an index"),
    "weigh shape": (lambda: tw.weigh_pairs(A, B, 1.0, None, weight=torch.ones(1)), tw.ShapeError, r"weight must have shape \(6,\).*\(1,\)"),
    "weigh dtype": (lambda: tw.weigh_pairs(A, B, 1.0, None, weight=INT), tw.DtypeError, "weight must be float64"),
    "weigh list": (lambda: tw.weigh_pairs(A, B, 1.0, None, weight=[1.0] * 6), tw.DtypeError, "weight must be a tensor, got list"),
    "negative ids list": (lambda: tw.info_nce(A, B, 1.0, negatives=A, negative_ids=[1], ids=INT), tw.DtypeError, "negative_ids must be an integer tensor, got list"),
    "negative ids float": (
        lambda: tw.info_nce(A, B, 1.0, negatives=A[:, None], negative_ids=A[:, :1], ids=INT), tw.DtypeError, "negative_ids must be an integer tensor, got torch.float32"),
    "bias nan for clip": (lambda: tw.clip_loss(A, B, 1.0, bias=torch.tensor(torch.nan)), tw.OptionError, "bias must be finite, got nan"),
    "temperature text": (lambda: tw.clip_loss(A, B, temperature="0.1"), tw.DtypeError, "temperature must be a number or a tensor, got str"),
    "temperature infinite": (lambda: tw.clip_loss(A, B, temperature=float("inf")), tw.OptionError, "temperature must be finite"),
    "temperature tensor": (lambda: tw.clip_loss(A, B, temperature=torch.tensor(0.0)), tw.OptionError, "temperature must be above 0, got 0.0"),
    "check_values": (lambda: tw.clip_loss(A, B, 1.0, check_values="yes"), tw.DtypeError, "check_values must be True or False, got 'yes'"),
    "module option": (lambda: tw.NTXentLoss(temprature=0.1), tw.OptionError, "nt_xent has no option 'temprature'; did you mean 'temperature'"),
    "open_clip option": (lambda: tw.ClipLoss(smoothing=0.1), tw.OptionError, "clip_loss has no option 'smoothing'"),
    "scale of an open_clip module": (lambda: tw.ClipLoss(scale=1.0), tw.OptionError, "scale of clip_loss comes with every call"),
    "temperature of an open_clip module": (lambda: tw.SigLipLoss(temperature=0.1), tw.OptionError, "temperature of siglip_loss comes with every call"),
    "bias of an open_clip module": (lambda: tw.ClipLoss(bias=1.0), tw.OptionError, "bias of clip_loss comes with every call"),
    "features of a module": (lambda: tw.InfoNCELoss(query=A), tw.OptionError, "query of info_nce comes with every call"),
    "two factors of a module": (lambda: tw.SupConLoss(0.1, scale=10.0), tw.OptionError, "both set the same factor"),
    "device not here": (lambda: tw.clip_loss(A, B, 1.0, device="cuda:99"), tw.DeviceError, "device must be one that is here, got 'cuda:99'"),
    "device unknown": (lambda: tw.sup_con(A, INT, device="foo"), tw.DeviceError, "device must be one that is here, got 'foo'"),
    "device number": (lambda: tw.reduce_pairs(A, B, device=1.5), tw.DeviceError, "device must be one that is here, got 1.5"),
    "memory bank": (lambda: tw.NTXentLoss(0.5, 4096), tw.OptionError, "memory_bank_size must be 0, got 4096"),
    "world size": (lambda: tw.ClipLoss(rank=0, world_size=2)(A, B, 1.0), tw.OptionError, "torch.distributed, which is not initialised"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, tw.TilewiseError)
    assert type(caught.value) is kind


@pytest.mark.parametrize("mib", [1e15, 1e300])
def test_more_memory_than_there_is(mib):
    """It is a bound: as many bytes as an integer can tell will do."""
    a = A.clone().requires_grad_()
    loss = tw.clip_loss(a, B, 1.0, workspace_mib=mib, keep_mib=mib)
    loss.backward()
    assert loss == tw.clip_loss(A, B, 1.0)
    assert tw.explain_keep(A, B, mib).chunks == 0


def test_backend_choice_explains_itself():
    choice = tw.explain_backend(A)
    assert choice.name == "chunked"
    assert str(choice) == (
        "fused: passed over, it needs a CUDA or ROCm device, got cpu\nchunked: chosen"
    )


def test_auto_takes_the_fused_backend_where_it_is_exact(monkeypatch):
    from tilewise import backends
    from tilewise.backends import fused

    monkeypatch.setattr(fused, "_missing", lambda: None)
    cuda = torch.device("cuda")
    chosen = {
        dtype: backends.choose("auto", cuda, dtype).name
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    }
    assert chosen == {
        torch.float16: "fused",
        torch.bfloat16: "fused",
        torch.float32: "chunked",
        torch.float64: "chunked",
    }
    assert "ask for it by name" in backends.choose("auto", cuda, torch.float32).refusals["fused"]
    assert backends.choose("fused", cuda, torch.float32).name == "fused"


def test_auto_leaves_old_devices_to_chunked(monkeypatch):
    from tilewise import backends
    from tilewise.backends import fused

    monkeypatch.setattr(fused, "_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    fused._too_old.cache_clear()
    choice = backends.choose("auto", torch.device("cuda"), torch.float16)
    fused._too_old.cache_clear()
    assert choice.name == "chunked"
    assert choice.refusals["fused"] == "it needs compute capability 8.0, got 7.5"


def test_fused_says_what_it_needs(monkeypatch):
    """Below its torch or without Triton it refuses with the reason, and auto passes it over."""
    from tilewise import backends
    from tilewise.backends import fused

    cuda = torch.device("cuda")
    monkeypatch.setattr(fused, "_missing", fused._missing.__wrapped__)
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch, "__version__", "2.8.0")
    assert "pip install 'tilewise[fused]'" in fused.refusal(cuda, torch.bfloat16)
    monkeypatch.setattr(torch, "__version__", "2.5.1")
    assert "needs torch >= 2.8, got 2.5.1" in fused.refusal(cuda, torch.bfloat16)
    choice = backends.choose("auto", cuda, torch.bfloat16)
    assert choice.name == "chunked"
    assert "needs torch >= 2.8" in choice.refusals["fused"]
    with pytest.raises(tw.BackendError, match=r"cannot run: it needs torch >= 2\.8, got 2\.5\.1"):
        backends.choose("fused", cuda, torch.bfloat16)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["image", "text"])
@pytest.mark.parametrize("backend", ["dense", "chunked"])
@pytest.mark.parametrize("loss", ["clip", "siglip", "info_nce", "nt_xent", "sup_con"])
def test_non_finite_features_give_a_non_finite_loss(loss, backend, side, value):
    """Also where the other side is orthogonal or opposed, so that logits are all -inf."""
    calls = {
        "clip": lambda a, b: tw.clip_loss(a, b, 10.0, backend=backend),
        "siglip": lambda a, b: tw.siglip_loss(a, b, 10.0, backend=backend),
        "info_nce": lambda a, b: tw.info_nce(a, b, 10.0, backend=backend),
        "nt_xent": lambda a, b: tw.nt_xent(a, b, backend=backend),
        "sup_con": lambda a, b: tw.sup_con(torch.cat([a, b]), INT.repeat(2), backend=backend),
    }
    for sign in (1.0, -1.0):
        a, b = A.abs().clone(), sign * B.abs().clone()
        (a if side == "image" else b)[3, 2] = value
        assert not calls[loss](a, b).isfinite()


@pytest.mark.parametrize("value", [-2, 6, 10**9])
def test_out_of_range_positive_on_a_device_is_nan(value, monkeypatch):
    """Devices are not read back: that row's loss is NaN, the others' are right."""
    from tilewise import autograd

    monkeypatch.setattr(autograd, "check_values", lambda pairs: None)
    index = INT.clone()
    index[2] = value
    for backend in ("dense", "chunked"):
        for loss, options in (
            (tw.info_nce, {}),
            (tw.info_nce, {"decoupled": True}),
            (tw.siglip_loss, {}),
        ):
            how = {**options, "reduction": "none", "backend": backend}
            rows = loss(A, B, 1.0, positives=index, **how)
            right = loss(A, B, 1.0, **how)
            assert rows[2].isnan()
            keep = torch.arange(6) != 2
            assert torch.equal(rows[keep], right[keep])
        assert tw.siglip_loss(A, B, 1.0, positives=index, backend=backend).isnan()


def test_positives_that_are_not_mutual_on_a_device_are_nan(monkeypatch):
    from tilewise import autograd

    monkeypatch.setattr(autograd, "check_values", lambda pairs: None)
    index = torch.tensor([1, 0, 3, 4, 2, tw.NO_POSITIVE])
    for backend in ("dense", "chunked"):
        swept = tw.reduce_pairs(A, None, positives=index, skip_self=True, backend=backend)
        assert swept.rows.positives.isnan().tolist() == [False, False, True, True, True, False]
