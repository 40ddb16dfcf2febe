"""Copies both ways: pinned, pageable, strided, of another dtype, made from host data."""

# One case a line, as a table.

import numpy as np
import torch
import torch.nn.functional as F
from more_cases import Case, adder, floats, ints, mask_of, pinned

add = adder("d2h")
add("to_cpu_dtype", lambda d: floats(d).bfloat16(), lambda s: s.to('cpu', torch.float32))
add("to_cpu_dtype_nonblocking", lambda d: floats(d).bfloat16(), lambda s: s.to('cpu', torch.float32, non_blocking=True))
add("float_then_cpu", lambda d: floats(d).bfloat16(), lambda s: s.float().cpu())
add("cpu_transposed", lambda d: floats(d, 8, 9), lambda s: s.t().cpu())
add("cpu_strided", lambda d: floats(d, 8, 9), lambda s: s[:, ::2].cpu())
add("cpu_expanded", lambda d: floats(d, 8, 1), lambda s: s.expand(8, 5).cpu())
add("cpu_empty", lambda d: torch.empty(0, device=d), lambda s: s.cpu())
add("cpu_column", lambda d: floats(d, 8, 9), lambda s: s[:, 0].cpu())
add("to_cpu_strided_nonblocking", lambda d: floats(d, 8, 9), lambda s: s[:, ::2].to('cpu', non_blocking=True))
add("to_cpu_transposed_nonblocking", lambda d: floats(d, 8, 9), lambda s: s.t().to('cpu', non_blocking=True))
add("to_other_cpu", lambda d: (floats(d), torch.zeros(1)), lambda s: s[0].to(s[1]))
add("type_cpu", lambda d: floats(d), lambda s: s.type(torch.FloatTensor))
add("type_as_cpu", lambda d: (floats(d), torch.zeros(1)), lambda s: s[0].type_as(s[1]))
add("copy_pageable_dtype", lambda d: (ints(d), torch.empty(64)), lambda s: s[1].copy_(s[0]))
add("copy_pageable_dtype_nonblocking", lambda d: (ints(d), torch.empty(64)), lambda s: s[1].copy_(s[0], non_blocking=True))
add("copy_pinned_dtype_blocking", lambda d: (ints(d), pinned(64)), lambda s: s[1].copy_(s[0]))
add("copy_pinned_slice_nonblocking", lambda d: (floats(d), pinned(128)), lambda s: s[1][:64].copy_(s[0], non_blocking=True))
add("copy_pinned_rows_nonblocking", lambda d: (floats(d, 4, 8), pinned(16, 8)), lambda s: s[1][4:8].copy_(s[0], non_blocking=True))
add("copy_pinned_broadcast_nonblocking", lambda d: (floats(d, 8), pinned(4, 8)), lambda s: s[1].copy_(s[0], non_blocking=True))
add("copy_pinned_broadcast_blocking", lambda d: (floats(d, 8), pinned(4, 8)), lambda s: s[1].copy_(s[0]))
add("copy_strided_pinned_blocking", lambda d: (floats(d, 8, 4), pinned(8, 8)), lambda s: s[1][:, :4].copy_(s[0]))
add("copy_both_strided_nonblocking", lambda d: (floats(d, 8, 8), pinned(8, 8)), lambda s: s[1][:, :4].copy_(s[0][:, :4], non_blocking=True))
add("copy_both_transposed_nonblocking", lambda d: (floats(d, 8, 9), pinned(8, 9)), lambda s: s[1].t().copy_(s[0].t(), non_blocking=True))
add("copy_strided_dtype_pinned_nonblocking", lambda d: (ints(d).view(8, 8), pinned(8, 8)), lambda s: s[1][:, :4].copy_(s[0][:, :4], non_blocking=True))
add("copy_strided_src_pinned_blocking", lambda d: (floats(d, 8, 8), pinned(8, 4)), lambda s: s[1].copy_(s[0][:, ::2]))
add("copy_strided_src_dtype_nonblocking", lambda d: (ints(d).view(8, 8), pinned(8, 4)), lambda s: s[1].copy_(s[0][:, ::2], non_blocking=True))
add("copy_transposed_dtype_nonblocking", lambda d: (ints(d).view(8, 8), pinned(8, 8)), lambda s: s[1].copy_(s[0].t(), non_blocking=True))
add("cpu_setitem_from_device", lambda d: (floats(d, 4), torch.zeros(16)), lambda s: s[1].__setitem__(slice(0, 4), s[0]))
add("cpu_setitem_scalar_from_device", lambda d: (floats(d, 4), torch.zeros(16)), lambda s: s[1].__setitem__(0, s[0][1]))
add("pinned_setitem_from_device", lambda d: (floats(d, 4), pinned(16)), lambda s: s[1].__setitem__(slice(0, 4), s[0]))
add("cpu_then_pin", lambda d: floats(d), lambda s: s.cpu().pin_memory())
add("empty_like_pinned_copy", lambda d: floats(d), lambda s: torch.empty_like(s, device='cpu', pin_memory=True).copy_(s, non_blocking=True))
add("cpu_plus_device_scalar", lambda d: floats(d)[0], lambda s: torch.ones(3) + s)
add("cpu_plus_device", lambda d: floats(d, 3), lambda s: torch.ones(3) + s)
add("two_cpus", lambda d: (floats(d), ints(d)), lambda s: (s[0].cpu(), s[1].cpu()))
add("cat_then_cpu", lambda d: (floats(d), floats(d)), lambda s: torch.cat(s).cpu())
add("untyped_deepcopy_cpu", lambda d: floats(d), lambda s: s.detach().to(device='cpu', copy=True))
add("to_cpu_of_cpu", lambda d: torch.ones(3), lambda s: s.to('cpu', non_blocking=True))
add("d2h_1mb_blocking", lambda d: floats(d, 1 << 18), lambda s: s.cpu())


class pinned_nonblocking_then_stream_sync(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.empty(4096, pin_memory=True)

    def run(s):
        s[1].copy_(s[0], non_blocking=True)
        torch.cuda.current_stream().synchronize()  # @sync
        return s[1].sum()


class pinned_nonblocking_then_device_sync(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.empty(4096, pin_memory=True)

    def run(s):
        s[1].copy_(s[0], non_blocking=True)
        torch.cuda.synchronize()  # @sync
        return s[1].sum()


class pinned_nonblocking_kernel_then_event(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.empty(4096, pin_memory=True), torch.cuda.Event()

    def run(s):
        s[1].copy_(s[0], non_blocking=True)
        s[2].record()
        s[0].add_(1)
        s[2].synchronize()  # @sync
        return s[1].sum()


class side_stream_copy_then_event(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.empty(4096, pin_memory=True), torch.cuda.Stream(), torch.cuda.Event()

    def run(s):
        x, host, stream, event = s
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(x, non_blocking=True)
            event.record(stream)
        event.synchronize()  # @sync
        return host.sum()


class side_stream_to_cpu_then_stream_sync(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.cuda.Stream()

    def run(s):
        x, stream = s
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = x.to("cpu", non_blocking=True)
        stream.synchronize()  # @sync
        return y


class pageable_nonblocking_then_stream_sync(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.empty(4096)

    def run(s):
        s[1].copy_(s[0], non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return s[1].sum()


class pageable_nonblocking_then_device_sync(Case):
    group = "d2h"

    def setup(d):
        return torch.rand(4096, device=d), torch.empty(4096)

    def run(s):
        s[1].copy_(s[0], non_blocking=True)
        torch.cuda.synchronize()
        return s[1].sum()


add = adder("h2d")
add("from_numpy_to", lambda d: (np.arange(64), d), lambda s: torch.from_numpy(s[0]).to(s[1]))
add("from_numpy_to_nonblocking", lambda d: (np.arange(64), d), lambda s: torch.from_numpy(s[0]).to(s[1], non_blocking=True))
add("as_tensor_list", lambda d: ([1, 2, 3], d), lambda s: torch.as_tensor(s[0], device=s[1]))
add("as_tensor_ndarray", lambda d: (np.arange(64), d), lambda s: torch.as_tensor(s[0], device=s[1]))
add("tensor_ndarray", lambda d: (np.arange(64), d), lambda s: torch.tensor(s[0], device=s[1]))
add("asarray_list", lambda d: ([1, 2, 3], d), lambda s: torch.asarray(s[0], device=s[1]))
add("tensor_of_cpu_tensor", lambda d: (torch.arange(3), d), lambda s: torch.as_tensor(s[0], device=s[1]))
add("new_tensor", lambda d: floats(d), lambda s: s.new_tensor([1, 2, 3]))
add("new_full", lambda d: floats(d), lambda s: s.new_full((3,), 2.0))
add("new_zeros", lambda d: floats(d), lambda s: s.new_zeros(3))
add("long_tensor_to", lambda d: d, lambda s: torch.LongTensor([1, 2, 3]).to(s))
add("cuda_long_tensor", lambda d: d, lambda s: torch.cuda.LongTensor([1, 2, 3]))
add("cuda_method", lambda d: torch.arange(64), lambda s: s.cuda())
add("cuda_method_nonblocking", lambda d: torch.arange(64), lambda s: s.cuda(non_blocking=True))
add("cuda_pinned_nonblocking", lambda d: pinned(64), lambda s: s.cuda(non_blocking=True))
add("to_device_dtype", lambda d: (torch.arange(64), d), lambda s: s[0].to(s[1], torch.int32))
add("to_device_dtype_nonblocking", lambda d: (torch.arange(64), d), lambda s: s[0].to(s[1], torch.int32, non_blocking=True))
add("pinned_to_dtype_nonblocking", lambda d: (pinned(64, dtype=torch.int64), d), lambda s: s[0].to(s[1], torch.int32, non_blocking=True))
add("pinned_to_dtype_blocking", lambda d: (pinned(64, dtype=torch.int64), d), lambda s: s[0].to(s[1], torch.int32))
add("pinned_strided_to_nonblocking", lambda d: (pinned(8, 8), d), lambda s: s[0][:, :4].to(s[1], non_blocking=True))
add("pinned_transposed_to_nonblocking", lambda d: (pinned(8, 9), d), lambda s: s[0].t().to(s[1], non_blocking=True))
add("pinned_expand_to_nonblocking", lambda d: (pinned(8, 1), d), lambda s: s[0].expand(8, 4).to(s[1], non_blocking=True))
add("copy_broadcast_pinned_nonblocking", lambda d: (floats(d, 4, 8), pinned(8)), lambda s: s[0].copy_(s[1], non_blocking=True))
add("copy_broadcast_blocking", lambda d: (floats(d, 4, 8), torch.ones(8)), lambda s: s[0].copy_(s[1]))
add("copy_scalar_tensor", lambda d: floats(d, 4, 8), lambda s: s.copy_(torch.tensor(2.0)))
add("copy_into_strided_device_nonblocking", lambda d: (floats(d, 8, 8), pinned(8, 4)), lambda s: s[0][:, :4].copy_(s[1], non_blocking=True))
add("copy_into_strided_device_blocking", lambda d: (floats(d, 8, 8), pinned(8, 4)), lambda s: s[0][:, :4].copy_(s[1]))
add("copy_dtype_nonblocking", lambda d: (floats(d), pinned(64, dtype=torch.int64)), lambda s: s[0].copy_(s[1], non_blocking=True))
add("copy_dtype_strided_nonblocking", lambda d: (floats(d, 8, 8), pinned(8, 4, dtype=torch.int64)), lambda s: s[0][:, :4].copy_(s[1], non_blocking=True))
add("copy_dtype_blocking", lambda d: (floats(d), torch.arange(64)), lambda s: s[0].copy_(s[1]))
add("setitem_slice_cpu", lambda d: (floats(d), torch.ones(4)), lambda s: s[0].__setitem__(slice(0, 4), s[1]))
add("setitem_slice_pinned", lambda d: (floats(d), pinned(4)), lambda s: s[0].__setitem__(slice(0, 4), s[1]))
add("setitem_int_cpu_scalar", lambda d: (floats(d), torch.tensor(2.0)), lambda s: s[0].__setitem__(0, s[1]))
add("fill_python", lambda d: floats(d), lambda s: s.fill_(2.0))
add("fill_cpu_scalar", lambda d: floats(d), lambda s: s.fill_(torch.tensor(2.0)))
add("full_on_device", lambda d: d, lambda s: torch.full((4,), 2.0, device=s))
add("ones_on_device", lambda d: d, lambda s: torch.ones(4, device=s))
add("empty_on_device", lambda d: d, lambda s: torch.empty(4, device=s))
add("zeros_like_on", lambda d: floats(d), lambda s: torch.zeros_like(s))
add("full_like_on", lambda d: floats(d), lambda s: torch.full_like(s, 3))
add("scalar_tensor_on", lambda d: d, lambda s: torch.scalar_tensor(3.0, device=s))
add("arange_on", lambda d: d, lambda s: torch.arange(33, device=s))
add("linspace_on", lambda d: d, lambda s: torch.linspace(0, 1, 5, device=s))
add("eye_on", lambda d: d, lambda s: torch.eye(5, device=s))
add("tensor_bool", lambda d: d, lambda s: torch.tensor(True, device=s))
add("tensor_empty_list", lambda d: d, lambda s: torch.tensor([], device=s))
add("tensor_nested_list", lambda d: d, lambda s: torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=s))
add("tensor_then_cuda", lambda d: d, lambda s: torch.tensor([1, 2, 3]).cuda())
add("mul_cpu_scalar", lambda d: floats(d), lambda s: s * torch.tensor(2.0))
add("add_cpu_scalar_tensor", lambda d: floats(d), lambda s: torch.tensor(2.0) + s)
add("mul_cpu_1elem", lambda d: floats(d), lambda s: s * torch.ones(1))
add("where_cpu_scalar", lambda d: (mask_of(d, 64), floats(d)), lambda s: torch.where(s[0], s[1], torch.tensor(0.0)))
add("where_python", lambda d: (mask_of(d, 64), floats(d)), lambda s: torch.where(s[0], s[1], 0.0))
add("where_python_both", lambda d: mask_of(d, 64), lambda s: torch.where(s, 1.0, 0.0))
add("where_device_scalar", lambda d: (mask_of(d, 64), floats(d), torch.tensor(0.0, device=d)), lambda s: torch.where(*s))
add("where_new_scalar", lambda d: (mask_of(d, 64), floats(d)), lambda s: torch.where(s[0], s[1], torch.tensor(0.0, device=s[1].device)))
add("clamp_cpu_scalar", lambda d: floats(d), lambda s: s.clamp(min=torch.tensor(0.2)))
add("maximum_cpu_scalar", lambda d: floats(d), lambda s: torch.maximum(s, torch.tensor(0.2)))
add("lerp_cpu_weight", lambda d: floats(d), lambda s: torch.lerp(s, s, torch.tensor(0.2)))
add("addcmul_cpu", lambda d: floats(d), lambda s: torch.addcmul(s, s, torch.tensor(0.2)))
add("stack_host_then_to", lambda d: d, lambda s: torch.stack([torch.tensor(1), torch.tensor(2)]).to(s))
add("pin_then_to", lambda d: (np.arange(64), d), lambda s: torch.from_numpy(s[0]).pin_memory().to(s[1], non_blocking=True))
add("pinned_to_blocking", lambda d: (pinned(64), d), lambda s: s[0].to(s[1]))
add("to_device_twice", lambda d: (floats(d), d), lambda s: s[0].to(s[1]).to(s[1], non_blocking=True))
add("to_dtype_on_device", lambda d: floats(d), lambda s: s.to(torch.bfloat16))
add("to_other_device_tensor", lambda d: (torch.ones(4), floats(d)), lambda s: s[0].to(s[1]))
add("h2d_2mb_nonblocking", lambda d: (torch.zeros(1 << 19), d), lambda s: s[0].to(s[1], non_blocking=True))
add("h2d_8mb_nonblocking", lambda d: (torch.zeros(1 << 21), floats(d, 1 << 21)), lambda s: s[1].copy_(s[0], non_blocking=True))
add("h2d_empty", lambda d: (torch.zeros(0), d), lambda s: s[0].to(s[1]))
add("module_to", lambda d: d, lambda s: torch.nn.Linear(4, 4).to(s))
add("clone_on_device", lambda d: floats(d), lambda s: s.clone())
add("clone_strided", lambda d: floats(d, 8, 8), lambda s: s[:, ::2].clone())
add("contiguous_transposed", lambda d: floats(d, 8, 9), lambda s: s.t().contiguous())
add("copy_d2d", lambda d: (floats(d), floats(d)), lambda s: s[0].copy_(s[1]))
add("copy_d2d_dtype", lambda d: (floats(d), ints(d)), lambda s: s[0].copy_(s[1]))
add("copy_d2d_strided", lambda d: (floats(d, 8, 8), floats(d, 8, 4)), lambda s: s[0][:, :4].copy_(s[1]))
add("copy_d2d_broadcast", lambda d: (floats(d, 4, 8), floats(d, 8)), lambda s: s[0].copy_(s[1]))


add = adder("d2h")
add("device_to_cpu_dtype_kw", lambda d: floats(d), lambda s: s.to(device='cpu', dtype=torch.float64))
add("half_pinned_nonblocking_same", lambda d: (floats(d).half(), pinned(64, dtype=torch.float16)), lambda s: s[1].copy_(s[0], non_blocking=True))
add("pinned_2d_from_1d_view", lambda d: (floats(d), pinned(8, 8)), lambda s: s[1].view(-1).copy_(s[0], non_blocking=True))
add("pinned_from_transposed_nonblocking", lambda d: (floats(d, 8, 9), pinned(9, 8)), lambda s: s[1].copy_(s[0].t(), non_blocking=True))
add("cpu_add_out", lambda d: (floats(d), torch.empty(64)), lambda s: torch.add(s[0], 1, out=s[1]))
add("cpu_index_put_device_values", lambda d: (floats(d, 2), torch.zeros(8), torch.tensor([1, 2])), lambda s: s[1].__setitem__(s[2], s[0]))
add("cpu_setitem_mask_device", lambda d: (floats(d)[0], torch.zeros(8), torch.ones(8, dtype=torch.bool)), lambda s: s[1].__setitem__(s[2], s[0]))
add("cpu_iadd_device_cpu", lambda d: (floats(d), torch.zeros(64)), lambda s: s[1].add_(s[0].cpu()))
add("cpu_masked_fill_device_value", lambda d: (floats(d)[0], torch.zeros(8), torch.ones(8, dtype=torch.bool)), lambda s: s[1].masked_fill_(s[2], s[0]))
add("cpu_fill_device_value", lambda d: (floats(d)[0], torch.zeros(8)), lambda s: s[1].fill_(s[0]))
add("storage_tolist", lambda d: ints(d, 4), lambda s: s.untyped_storage().nbytes())
add("complex_cpu", lambda d: torch.view_as_complex(floats(d, 8, 2)), lambda s: s.cpu())
add("uint8_pinned_nonblocking", lambda d: (mask_of(d), pinned(256, dtype=torch.bool)), lambda s: s[1].copy_(s[0], non_blocking=True))
add("dict_of_cpus", lambda d: {'a': ints(d), 'b': floats(d)}, lambda s: {k: v.cpu() for k, v in s.items()})
add("stack_then_tolist", lambda d: (ints(d), ints(d)), lambda s: torch.stack([s[0].max(), s[1].min()]).tolist())
add("to_cpu_nonblocking_then_tolist_unsafe", lambda d: ints(d), lambda s: s.to('cpu', non_blocking=True).tolist())
add("new_empty_cpu_copy", lambda d: floats(d), lambda s: s.new_empty(64, device='cpu').copy_(s))
add("view_dtype_cpu", lambda d: floats(d), lambda s: s.view(torch.int32).cpu())


add = adder("h2d")
add("tensor_class_to", lambda d: d, lambda s: torch.Tensor([1.0, 2.0]).to(s))
add("tensor_range", lambda d: d, lambda s: torch.tensor(range(10), device=s))
add("tensor_of_numpy_scalar", lambda d: d, lambda s: torch.tensor(np.float32(2.0), device=s))
add("tensor_of_tuple_shape", lambda d: floats(d, 3, 4), lambda s: torch.tensor(s.shape, device=s.device))
add("new_empty_method", lambda d: floats(d), lambda s: s.new_empty(3))
add("new_ones_method", lambda d: floats(d), lambda s: s.new_ones(3))
add("setitem_numpy_scalar", lambda d: floats(d), lambda s: s.__setitem__(0, np.float32(2.0)))
add("setitem_slice_list_raises", lambda d: floats(d), lambda s: s.__setitem__(slice(0, 2), [1.0, 2.0]))
add("setitem_slice_numpy_raises", lambda d: floats(d), lambda s: s.__setitem__(slice(0, 2), np.ones(2, dtype=np.float32)))
add("setitem_slice_new_tensor", lambda d: floats(d), lambda s: s.__setitem__(slice(0, 2), torch.tensor([1.0, 2.0], device=s.device)))
add("setitem_slice_cpu_dtype", lambda d: floats(d), lambda s: s.__setitem__(slice(0, 4), torch.arange(4)))
add("add_python_list_raises", lambda d: floats(d, 2), lambda s: s + [1.0, 2.0])
add("full_then_index", lambda d: d, lambda s: torch.full((4,), -1, dtype=torch.int32, device=s)[0])
add("arange_cpu_to_pinned", lambda d: d, lambda s: torch.arange(8).pin_memory().to(s, non_blocking=True))
add("zeros_pinned_to", lambda d: d, lambda s: torch.zeros(8, pin_memory=True).to(s, non_blocking=True))
add("pinned_slice_nonblocking", lambda d: (pinned(64), floats(d)), lambda s: s[1][:8].copy_(s[0][:8], non_blocking=True))
add("pinned_row_nonblocking", lambda d: (pinned(8, 8), floats(d, 8, 8)), lambda s: s[1][2:4].copy_(s[0][2:4], non_blocking=True))
add("pinned_column_nonblocking", lambda d: (pinned(8, 8), floats(d, 8)), lambda s: s[1].copy_(s[0][:, 0], non_blocking=True))
add("pinned_numpy_written_to", lambda d: (pinned(64), d), lambda s: (s[0].numpy().fill(1.0), s[0].to(s[1], non_blocking=True)))
add("cat_cpu_then_to", lambda d: d, lambda s: torch.cat([torch.ones(2), torch.ones(3)]).to(s))
add("module_buffers_to", lambda d: d, lambda s: torch.nn.BatchNorm1d(4).to(s))
add("module_cuda", lambda d: d, lambda s: torch.nn.LayerNorm(4).cuda())
add("linear_on_device", lambda d: d, lambda s: torch.nn.Linear(4, 4, device=s))
add("param_data_copy", lambda d: (torch.nn.Linear(4, 4, device=d), torch.ones(4, 4)), lambda s: s[0].weight.data.copy_(s[1]))
add("load_state_dict", lambda d: (torch.nn.Linear(4, 4, device=d), {'weight': torch.ones(4, 4), 'bias': torch.ones(4)}), lambda s: s[0].load_state_dict(s[1]))
add("where_cpu_both", lambda d: mask_of(d, 64), lambda s: torch.where(s, torch.tensor(1.0), torch.tensor(0.0)))
add("where_cpu_condition", lambda d: (torch.tensor(True), floats(d), floats(d)), lambda s: torch.where(*s))
add("masked_fill_new_scalar", lambda d: (floats(d), mask_of(d, 64)), lambda s: s[0].masked_fill_(s[1], torch.tensor(-1.0, device=s[0].device)))
add("index_fill_new_scalar", lambda d: (floats(d), ints(d, 4)), lambda s: s[0].index_fill_(0, s[1], torch.tensor(-1.0, device=s[0].device)))
add("scatter_cpu_index_raises", lambda d: (floats(d), torch.arange(4)), lambda s: s[0].scatter_(0, s[1], 1.0))
add("index_copy_list_index", lambda d: (floats(d), floats(d, 2)), lambda s: s[0].index_copy_(0, torch.tensor([1, 2], device=s[0].device), s[1]))
add("index_select_new_index", lambda d: floats(d), lambda s: s.index_select(0, torch.tensor([1, 2], device=s.device)))
add("pow_python", lambda d: floats(d), lambda s: 2.0 ** s)
add("python_minus", lambda d: floats(d), lambda s: 1 - s)
add("cpu_scalar_inplace", lambda d: floats(d), lambda s: s.add_(torch.tensor(1.0)))
add("cpu_scalar_compare", lambda d: floats(d), lambda s: s > torch.tensor(0.5))
add("cpu_scalar_0d_device", lambda d: floats(d)[0], lambda s: s + torch.tensor(0.5))
add("cumsum_of_list", lambda d: d, lambda s: torch.tensor([1, 2, 3], device=s).cumsum(0))
add("embedding_cpu_index_raises", lambda d: (floats(d, 8, 4), torch.arange(4)), lambda s: F.embedding(s[1], s[0]))
add("linear_cpu_weight_raises", lambda d: (floats(d, 8, 4), torch.ones(4, 4)), lambda s: F.linear(*s))
add("cat_mixed_raises", lambda d: (floats(d, 8), torch.ones(4)), lambda s: torch.cat(s))
add("split_cpu_lens_loop", lambda d: (floats(d), torch.tensor([10, 20, 34])), lambda s: s[0].split(s[1].tolist()))
add("repeat_interleave_list", lambda d: (ints(d, 3), d), lambda s: torch.repeat_interleave(s[0], torch.tensor([1, 2, 3], device=s[1])))
add("repeat_interleave_list_size", lambda d: (ints(d, 3), d), lambda s: torch.repeat_interleave(s[0], torch.tensor([1, 2, 3], device=s[1]), output_size=6))
add("generator_seed", lambda d: torch.Generator(device=d), lambda s: s.manual_seed(3))
add("generator_state", lambda d: torch.Generator(device=d), lambda s: s.get_state())
add("rng_state", lambda d: d, lambda s: torch.cuda.get_rng_state())
add("set_rng_state", lambda d: torch.cuda.get_rng_state(), lambda s: torch.cuda.set_rng_state(s))
