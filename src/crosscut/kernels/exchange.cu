// Collectives of the ranks of one NVLink host: every rank writes into mailboxes in its peers' memory and polls its own.
//
// Compiled at run time with -DN=<number of ranks>. No state but what lies in the workspace: a CUDA graph may replay any
// kernel here, and eager calls may come between replays. Three protocols, chosen by the host (crosscut/kernels/exchange.py):
//
//   lanes, sentinel   a lane is one 16-byte vector of floats; the data is its own arrival flag: a mailbox word of all ones
//                     (a NaN that no sender writes) means "not here yet". Four buffers take turns, each cleared by its
//                     reader one exchange after its use. All of the wire carries data.
//   lanes, flagged    a lane is 8 bytes of anything beside two copies of the lane's epoch, 16 bytes on the wire. Two
//                     buffers, nothing to clear. For data whose every bit counts.
//   blocks            a block moves chunks through staging memory and raises one flag a chunk (release, acquire). For sizes
//                     where the wire counts and latency does not.
//
// Why buffers can be reused without a barrier: a rank that is at exchange e of a lane (or block) has received every peer's
// data of e-1, and each peer sent that after it had read e-2. So e-2 is read everywhere, and with four sentinel buffers
// the clearing of the one written now happened in a kernel that had ended before the peer's e-1 began.
//
// Sources: arrival in the data: NCCL's LL protocol and TensorRT-LLM's "Lamport" kernels; one-shot and two-shot as there.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

struct __align__(16) Vec { u32 w[4]; };

struct Call {
    const u8* in;
    u8* out;
    const u8* residual;
    const u8* bias;
    const u8* gamma;
    const u8* beta;
    u8* residual_out;
    u8* mail[8];       // every rank's workspace, as mapped on this GPU
    u32* epochs;       // this rank's own counters: sentinel lanes, then flagged lanes, then blocks
    volatile u32* record;  // host memory: where a wait that ran out is written down
    u64 bytes;         // of one part: what one rank sends to one other
    u64 row;           // bytes of one row of a part where parts lie side by side, else all of a part
    u64 deadline;      // nanoseconds that any wait may take
    u64 flagged_at;    // offsets into a workspace
    u64 flags_at;
    u64 staging_at;
    u32 rank;
    u32 root;
    u32 lanes;         // lanes of each protocol (capacity)
    u32 blocks;        // blocks of the blocks protocol (capacity)
    u32 chunk;         // bytes of a staging slot
    u32 op;            // for the record
    u32 hidden;        // tail: elements of a token
    float eps;
};

#define SENTINEL 0xFFFFFFFFu
#define BUFFERS 4
#define SLOTS 4
#define SPINS_BETWEEN_LOOKS 2048

// ------------------------------------------------------------------------------------------------ memory and waiting

// Programmatic dependent launch: wait until the kernel before has ended and its writes are visible, then let the one after
// take its place on the multiprocessors. In this order at most one kernel stands ready behind the running one.
__device__ __forceinline__ void follow() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ void put(u8* at, Vec v) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
}
__device__ __forceinline__ Vec look(const u8* at) {
    Vec v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(at) : "memory");
    return v;
}
__device__ __forceinline__ u64 clock_ns() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }

// `valid` bytes at `at`, which need not be aligned; the rest is zero.
__device__ __forceinline__ Vec load(const u8* at, int valid) {
    Vec v = {{0, 0, 0, 0}};
    if (valid >= 16 && ((u64)at & 15) == 0) {
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3]) : "l"(at) : "memory");
        return v;
    }
    u64 low = 0, high = 0;
#pragma unroll 1
    for (int i = (valid < 16 ? valid : 16) - 1; i >= 0; --i) {
        high = high << 8 | low >> 56;
        low = low << 8 | at[i];
    }
    v = {{(u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32)}};
    return v;
}
__device__ __forceinline__ void store(u8* at, Vec v, int valid) {
    if (valid >= 16 && ((u64)at & 15) == 0) {
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]) : "memory");
        return;
    }
    u64 low = (u64)v.w[1] << 32 | v.w[0], high = (u64)v.w[3] << 32 | v.w[2];
#pragma unroll 1
    for (int i = 0; i < 16 && i < valid; ++i) {
        at[i] = (u8)low;
        low = low >> 8 | high << 56;
        high >>= 8;
    }
}

// A wait that knows its end. `give_up` is asked once for each fruitless look.
struct Patience {
    u64 since;
    u32 spins;
    __device__ __forceinline__ Patience() : since(0), spins(0) {}
    __device__ __forceinline__ bool give_up(const Call& c, u32 epoch, u32 peer) {
        if (++spins < SPINS_BETWEEN_LOOKS) return false;
        spins = 0;
        u64 now = clock_ns();
        if (since == 0) since = now;
        bool late = now - since >= c.deadline, broken = c.record[0] != 0;
        if (!late && !broken) return false;
        if (now - since >= c.deadline / 2) c.record[4 + peer] = 1;
        if (!broken) {
            c.record[1] = c.op;
            c.record[2] = epoch;
            c.record[3] = (u32)(c.deadline / 1000000);
            __threadfence_system();
            c.record[0] = 1;
        }
        return true;
    }
};

// ------------------------------------------------------------------------------------------------------ arithmetic

struct Bf16 {
    static const int COUNT = 8;
    static __device__ __forceinline__ void unpack(Vec v, float* f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) { f[2 * i] = __uint_as_float(v.w[i] << 16); f[2 * i + 1] = __uint_as_float(v.w[i] & 0xFFFF0000u); }
    }
    static __device__ __forceinline__ Vec pack(const float* f) {
        Vec v;
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
        return v;
    }
};
struct Fp16 {
    static const int COUNT = 8;
    static __device__ __forceinline__ void unpack(Vec v, float* f) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm("{ .reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(f[2 * i]), "=f"(f[2 * i + 1]) : "r"(v.w[i]));
    }
    static __device__ __forceinline__ Vec pack(const float* f) {
        Vec v;
#pragma unroll
        for (int i = 0; i < 4; ++i) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.w[i]) : "f"(f[2 * i + 1]), "f"(f[2 * i]));
        return v;
    }
};
struct Fp32 {
    static const int COUNT = 4;
    static __device__ __forceinline__ void unpack(Vec v, float* f) {
#pragma unroll
        for (int i = 0; i < 4; ++i) f[i] = __uint_as_float(v.w[i]);
    }
    static __device__ __forceinline__ Vec pack(const float* f) {
        Vec v;
#pragma unroll
        for (int i = 0; i < 4; ++i) v.w[i] = __float_as_uint(f[i]);
        return v;
    }
};

struct Sum { static __device__ __forceinline__ float of(float a, float b) { return a + b; } };
struct Max {
    static __device__ __forceinline__ float of(float a, float b) { float m; asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b)); return m; }
};

// The ranks' vectors reduced in float32 in the order of the ranks, so that every rank gets the same bits.
template <class T, class R, class Get>
__device__ __forceinline__ void reduce(float* total, Get get) {
#pragma unroll
    for (int q = 0; q < N; ++q) {
        float f[T::COUNT];
        T::unpack(get(q), f);
#pragma unroll
        for (int i = 0; i < T::COUNT; ++i) total[i] = q == 0 ? f[i] : R::of(total[i], f[i]);
    }
}

// A word of all ones is a NaN in each of the three types; so is what stands for it on the wire.
__device__ __forceinline__ Vec without_sentinel(Vec v) {
#pragma unroll
    for (int i = 0; i < 4; ++i) v.w[i] = v.w[i] == SENTINEL ? 0xFFFF7FFFu : v.w[i];
    return v;
}

// ----------------------------------------------------------------------------------------- lanes, sentinel protocol

__device__ __forceinline__ u8* sentinel_slot(const Call& c, u32 owner, u32 epoch, u32 source, u32 lane) {
    return c.mail[owner] + (((u64)(epoch % BUFFERS) * N + source) * c.lanes + lane) * 16;
}

__device__ __forceinline__ Vec sentinel_wait(const Call& c, u32 epoch, u32 source, u32 lane) {
    const u8* at = sentinel_slot(c, c.rank, epoch, source, lane);
    Patience patience;
    while (true) {
        Vec v = look(at);
        if (v.w[0] != SENTINEL && v.w[1] != SENTINEL && v.w[2] != SENTINEL && v.w[3] != SENTINEL) return v;
        if (patience.give_up(c, epoch, source)) return v;  // the words that did not come are NaN
    }
}

// One exchange of a lane: `give(p)` is sent to rank p; `got[q]` is what rank q sent here.
template <class Give>
__device__ __forceinline__ void sentinel_exchange(const Call& c, u32 epoch, u32 lane, Give give, Vec* got) {
#pragma unroll
    for (int hop = 1; hop < N; ++hop) {
        u32 p = (c.rank + hop) % N;
        put(sentinel_slot(c, p, epoch, c.rank, lane), give(p));
    }
    Vec mine = give(c.rank), empty = {{SENTINEL, SENTINEL, SENTINEL, SENTINEL}};
#pragma unroll
    for (int q = 0; q < N; ++q)
        if (q != c.rank) put(sentinel_slot(c, c.rank, epoch + BUFFERS - 1, q, lane), empty);  // the one used before this
#pragma unroll
    for (int q = 0; q < N; ++q) got[q] = q == c.rank ? mine : sentinel_wait(c, epoch, q, lane);
}

template <class T, class R>
__device__ __forceinline__ void one_shot(const Call& c) {
    u32 lane = blockIdx.x * blockDim.x + threadIdx.x;
    follow();
    u64 at = (u64)lane * 16;
    if (at >= c.bytes) return;
    int valid = c.bytes - at < 16 ? c.bytes - at : 16;
    u32 epoch = c.epochs[lane];
    Vec mine = without_sentinel(load(c.in + at, valid)), got[N];
    sentinel_exchange(c, epoch, lane, [&](u32) { return mine; }, got);
    float total[T::COUNT];
    reduce<T, R>(total, [&](int q) { return got[q]; });
    store(c.out + at, T::pack(total), valid);
    c.epochs[lane] = epoch + 1;
}

// Part p of the input is reduced by rank p and sent to all: two crossings, 2(N-1)/N of the bytes.
template <class T, class R>
__device__ __forceinline__ void two_shot(const Call& c, u64 total_bytes) {
    u32 lane = blockIdx.x * blockDim.x + threadIdx.x;
    follow();
    u64 at = (u64)lane * 16;
    if (at >= c.bytes) return;
    u32 epoch = c.epochs[lane];
    auto here = [&](u32 p) { return (u64)p * c.bytes + at; };
    auto valid = [&](u32 p) { u64 left = here(p) < total_bytes ? total_bytes - here(p) : 0; return left < 16 ? (int)left : 16; };
    Vec got[N];
    sentinel_exchange(c, epoch, lane, [&](u32 p) { return without_sentinel(load(c.in + here(p), valid(p))); }, got);
    float total[T::COUNT];
    reduce<T, R>(total, [&](int q) { return got[q]; });
    Vec mine = without_sentinel(T::pack(total));
    sentinel_exchange(c, epoch + 1, lane, [&](u32) { return mine; }, got);
#pragma unroll
    for (int q = 0; q < N; ++q) store(c.out + here(q), got[q], valid(q));
    c.epochs[lane] = epoch + 2;
}

// ------------------------------------------------------------------------------------------ lanes, flagged protocol

__device__ __forceinline__ u8* flagged_slot(const Call& c, u32 owner, u32 epoch, u32 source, u32 lane) {
    return c.mail[owner] + c.flagged_at + (((u64)(epoch & 1) * N + source) * c.lanes + lane) * 16;
}

__device__ __forceinline__ u64 flagged_wait(const Call& c, u32 epoch, u32 source, u32 lane) {
    const u8* at = flagged_slot(c, c.rank, epoch, source, lane);
    Patience patience;
    while (true) {
        Vec v = look(at);
        if (v.w[1] == epoch && v.w[3] == epoch) return (u64)v.w[2] << 32 | v.w[0];
        if (patience.give_up(c, epoch, source)) return ~0ull;
    }
}

__device__ __forceinline__ u64 load8(const u8* at, int valid) {
    if (valid >= 8 && ((u64)at & 7) == 0) return *(const u64*)at;
    u64 v = 0;
#pragma unroll 1
    for (int i = 0; i < 8 && i < valid; ++i) v |= (u64)at[i] << (8 * i);
    return v;
}
__device__ __forceinline__ void store8(u8* at, u64 v, int valid) {
    if (valid >= 8 && ((u64)at & 7) == 0) { *(u64*)at = v; return; }
#pragma unroll 1
    for (int i = 0; i < 8 && i < valid; ++i) at[i] = (u8)(v >> (8 * i));
}

// Where byte `at` of part `p` lies in a buffer that holds the parts side by side, row by row.
__device__ __forceinline__ u64 place(const Call& c, u32 p, u64 at) {
    if (c.row == c.bytes) return p * c.bytes + at;
    u32 r = (u32)(at / c.row);
    return (u64)r * c.row * N + p * c.row + (at - (u64)r * c.row);
}

enum { GATHER, SCATTER, ALL_TO_ALL, BROADCAST };

// Every rank sends 8 bytes to every other and gets 8 bytes from each. SCATTER reduces what came (T, R).
template <int KIND, class T, class R>
__device__ __forceinline__ void flagged(const Call& c) {
    u32 lane = blockIdx.x * blockDim.x + threadIdx.x;
    follow();
    u64 at = (u64)lane * 8;
    if (at >= c.bytes) return;
    int valid = c.bytes - at < 8 ? c.bytes - at : 8;
    u32* counter = c.epochs + c.lanes + lane;
    u32 epoch = *counter;
    auto give = [&](u32 p) -> u64 {
        if (KIND == GATHER) return load8(c.in + at, valid);
        if (KIND == BROADCAST) return c.rank == c.root ? load8(c.in + at, valid) : 0;
        return load8(c.in + place(c, p, at), valid);
    };
#pragma unroll
    for (int hop = 1; hop < N; ++hop) {
        u32 p = (c.rank + hop) % N;
        u64 v = give(p);
        Vec line = {{(u32)v, epoch, (u32)(v >> 32), epoch}};
        put(flagged_slot(c, p, epoch, c.rank, lane), line);
    }
    u64 mine = give(c.rank), got[N];
#pragma unroll
    for (int q = 0; q < N; ++q) got[q] = q == c.rank ? mine : flagged_wait(c, epoch, q, lane);
    if (KIND == SCATTER) {
        float total[T::COUNT];
        reduce<T, R>(total, [&](int q) { Vec v = {{(u32)got[q], (u32)(got[q] >> 32), 0, 0}}; return v; });
        Vec v = T::pack(total);
        store8(c.out + at, (u64)v.w[1] << 32 | v.w[0], valid);
    } else if (KIND == BROADCAST) {
#pragma unroll
        for (int q = 0; q < N; ++q)
            if (q == c.root) store8(c.out + at, got[q], valid);
    } else {
#pragma unroll
        for (int q = 0; q < N; ++q) store8(c.out + place(c, q, at), got[q], valid);
    }
    *counter = epoch + 1;
}

// --------------------------------------------------------------------------------------------------- blocks protocol

// One channel of a block: chunks are pushed and awaited in order, `SLOTS` of them in flight at most.
struct Channel {
    const Call& c;
    u32 index;  // which of the workspace's channels
    u32 pushed, awaited;
    u32* counter;
    __device__ __forceinline__ Channel(const Call& call, u32 which) : c(call), index(which * call.blocks + blockIdx.x) {
        counter = c.epochs + 2 * c.lanes + index;
        pushed = awaited = *counter;
    }
    __device__ __forceinline__ u8* slot(u32 owner, u32 source, u32 epoch) const {
        return c.mail[owner] + c.staging_at + (((u64)index * SLOTS + epoch % SLOTS) * N + source) * c.chunk;
    }
    __device__ __forceinline__ u32* flag(u32 owner, u32 source) const {
        return (u32*)(c.mail[owner] + c.flags_at) + index * N + source;
    }
    // After the block's threads have written to the peers' slots of `pushed`.
    __device__ __forceinline__ void raise() {
        __syncthreads();
        ++pushed;
        if (threadIdx.x < N && threadIdx.x != c.rank) {
            __threadfence_system();
            asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag(threadIdx.x, c.rank)), "r"(pushed) : "memory");
        }
    }
    // Until every peer's chunk `awaited` is here.
    __device__ __forceinline__ void await() {
        ++awaited;
        if (threadIdx.x < N && threadIdx.x != c.rank) {
            const u32* at = flag(c.rank, threadIdx.x);
            Patience patience;
            while (true) {
                u32 seen;
                asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(at) : "memory");
                if ((int)(seen - awaited) >= 0 || patience.give_up(c, awaited, threadIdx.x)) break;
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ void close() {
        __syncthreads();
        if (threadIdx.x == 0) *counter = pushed;
    }
};

enum { BLOCK_GATHER, BLOCK_SCATTER, BLOCK_ALL_TO_ALL, BLOCK_BROADCAST, BLOCK_ONE_SHOT };

template <class F>
__device__ __forceinline__ void each_vector(const Call& c, u64 chunk, F body) {
    u64 begin = chunk * c.chunk, end = begin + c.chunk < c.bytes ? begin + c.chunk : c.bytes;
#pragma unroll 4
    for (u64 at = begin + threadIdx.x * 16; at < end; at += blockDim.x * 16) body(at, at - begin, end - at < 16 ? (int)(end - at) : 16);
}

template <int KIND, class T, class R>
__device__ __forceinline__ void push_chunk(const Call& c, Channel& channel, u64 chunk) {
    if (KIND != BLOCK_BROADCAST || c.rank == c.root)
        each_vector(c, chunk, [&](u64 at, u64 within, int valid) {
            Vec same;
            if (KIND != BLOCK_SCATTER && KIND != BLOCK_ALL_TO_ALL) same = load(c.in + at, valid);
#pragma unroll
            for (int hop = 1; hop < N; ++hop) {
                u32 p = (c.rank + hop) % N;
                bool apart = KIND == BLOCK_SCATTER || KIND == BLOCK_ALL_TO_ALL;
                store(channel.slot(p, c.rank, channel.pushed) + within, apart ? load(c.in + place(c, p, at), valid) : same, 16);
            }
        });
    channel.raise();
}

template <int KIND, class T, class R>
__device__ __forceinline__ void take_chunk(const Call& c, Channel& channel, u64 chunk) {
    u32 epoch = channel.awaited;
    channel.await();
    each_vector(c, chunk, [&](u64 at, u64 within, int valid) {
        bool apart = KIND == BLOCK_SCATTER || KIND == BLOCK_ALL_TO_ALL;
        auto from = [&](u32 q) {
            return q == c.rank ? load(c.in + (apart ? place(c, q, at) : at), valid) : look(channel.slot(c.rank, q, epoch) + within);
        };
        if (KIND == BLOCK_SCATTER || KIND == BLOCK_ONE_SHOT) {
            float total[T::COUNT];
            reduce<T, R>(total, from);
            store(c.out + at, T::pack(total), valid);
        } else if (KIND == BLOCK_BROADCAST) {
            if (c.rank != c.root || c.out != c.in) store(c.out + at, from(c.root), valid);
        } else {
#pragma unroll
            for (int q = 0; q < N; ++q) store(c.out + place(c, q, at), from(q), valid);
        }
    });
}

template <int KIND, class T, class R>
__device__ __forceinline__ void blocks(const Call& c) {
    follow();
    u64 chunks = (c.bytes + c.chunk - 1) / c.chunk;
    Channel channel(c, 0);
    u64 chunk = blockIdx.x;
    if (chunk < chunks) push_chunk<KIND, T, R>(c, channel, chunk);
    for (; chunk < chunks; chunk += gridDim.x) {
        if (chunk + gridDim.x < chunks) push_chunk<KIND, T, R>(c, channel, chunk + gridDim.x);
        take_chunk<KIND, T, R>(c, channel, chunk);
    }
    channel.close();
}

// All-reduce as reduce-scatter and all-gather in one kernel, chunk by chunk: the second half of a chunk travels while the
// first half of the next one does. `bytes` is of one part; the last parts may reach beyond `total_bytes`.
template <class T, class R>
__device__ __forceinline__ void blocks_two_shot(const Call& c, u64 total_bytes) {
    follow();
    u64 chunks = (c.bytes + c.chunk - 1) / c.chunk;
    Channel scatter(c, 0), gather(c, 1);
    auto here = [&](u32 p, u64 at) { return (u64)p * c.bytes + at; };
    auto valid = [&](u32 p, u64 at) { u64 left = here(p, at) < total_bytes ? total_bytes - here(p, at) : 0; return left < 16 ? (int)left : 16; };
    auto send = [&](u64 chunk) {
        each_vector(c, chunk, [&](u64 at, u64 within, int) {
#pragma unroll
            for (int hop = 1; hop < N; ++hop) {
                u32 p = (c.rank + hop) % N;
                store(scatter.slot(p, c.rank, scatter.pushed) + within, load(c.in + here(p, at), valid(p, at)), 16);
            }
        });
        scatter.raise();
    };
    auto spread = [&](u64 chunk) {
        u32 epoch = scatter.awaited;
        scatter.await();
        each_vector(c, chunk, [&](u64 at, u64 within, int) {
            float total[T::COUNT];
            reduce<T, R>(total, [&](u32 q) {
                return q == c.rank ? load(c.in + here(q, at), valid(q, at)) : look(scatter.slot(c.rank, q, epoch) + within);
            });
            Vec v = T::pack(total);
            store(c.out + here(c.rank, at), v, valid(c.rank, at));
#pragma unroll
            for (int hop = 1; hop < N; ++hop) {
                u32 p = (c.rank + hop) % N;
                store(gather.slot(p, c.rank, gather.pushed) + within, v, 16);
            }
        });
        gather.raise();
    };
    auto collect = [&](u64 chunk) {
        u32 epoch = gather.awaited;
        gather.await();
        each_vector(c, chunk, [&](u64 at, u64 within, int) {
#pragma unroll
            for (int q = 0; q < N; ++q)
                if (q != c.rank) store(c.out + here(q, at), look(gather.slot(c.rank, q, epoch) + within), valid(q, at));
        });
    };
    u64 first = blockIdx.x, step = gridDim.x;
    if (first < chunks) send(first);
    for (u64 chunk = first; chunk < chunks; chunk += step) {
        if (chunk + step < chunks) send(chunk + step);
        spread(chunk);
        if (chunk != first) collect(chunk - step);
    }
    if (first < chunks) collect(first + (chunks - 1 - first) / step * step);
    scatter.close();
    gather.close();
}

// ------------------------------------------------------------------------------- the tail of a row-parallel layer

__device__ __forceinline__ float block_sum(float x, float* shared) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    float total = 0;
    for (int i = 0; i < (blockDim.x + 31) / 32; ++i) total += shared[i];
    return total;
}

// residual_out = residual + (sum over ranks of in, + bias); out = norm(residual_out) * gamma (+ beta). A block takes one
// token, a thread VECTORS vectors of it. LAYER: LayerNorm (mean and variance), else RMSNorm (arXiv 1910.07467).
// The sum is rounded to the dtype before the residual is added, and the result before the norm, as separate kernels would.
template <class T, int VECTORS, bool LAYER>
__device__ __forceinline__ void tail(const Call& c) {
    __shared__ float shared[32];
    follow();
    const int width = c.hidden / T::COUNT;  // vectors of a token
    Vec mine[VECTORS], residual[VECTORS];
    u32 epoch[VECTORS];
    u64 token = (u64)blockIdx.x * width;
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int v = threadIdx.x + j * blockDim.x;
        if (v >= width) continue;
        mine[j] = without_sentinel(load(c.in + (token + v) * 16, 16));
        epoch[j] = c.epochs[token + v];
#pragma unroll
        for (int hop = 1; hop < N; ++hop) {
            u32 p = (c.rank + hop) % N;
            put(sentinel_slot(c, p, epoch[j], c.rank, token + v), mine[j]);
        }
        residual[j] = load(c.residual + (token + v) * 16, 16);
    }
    Vec gamma[VECTORS], beta[VECTORS], bias[VECTORS];  // fetched while the peers' data is under way
    Vec none = {{0, 0, 0, 0}};
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int v = threadIdx.x + j * blockDim.x;
        bool on = v < width;
        gamma[j] = on ? load(c.gamma + v * 16, 16) : none;
        beta[j] = on && c.beta ? load(c.beta + v * 16, 16) : none;
        bias[j] = on && c.bias ? load(c.bias + v * 16, 16) : none;
    }
    float z[VECTORS][T::COUNT];
    float sum = 0;
    Vec empty = {{SENTINEL, SENTINEL, SENTINEL, SENTINEL}};
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int v = threadIdx.x + j * blockDim.x;
        if (v >= width) continue;
        u32 lane = token + v;
#pragma unroll
        for (int q = 0; q < N; ++q)
            if (q != c.rank) put(sentinel_slot(c, c.rank, epoch[j] + BUFFERS - 1, q, lane), empty);
        float r[T::COUNT], b[T::COUNT];
        reduce<T, Sum>(z[j], [&](u32 q) { return q == c.rank ? mine[j] : sentinel_wait(c, epoch[j], q, lane); });
        T::unpack(T::pack(z[j]), z[j]);
        if (c.bias) {
            T::unpack(bias[j], b);
#pragma unroll
            for (int i = 0; i < T::COUNT; ++i) z[j][i] += b[i];
            T::unpack(T::pack(z[j]), z[j]);
        }
        T::unpack(residual[j], r);
#pragma unroll
        for (int i = 0; i < T::COUNT; ++i) z[j][i] += r[i];
        Vec whole = T::pack(z[j]);
        store(c.residual_out + (token + v) * 16, whole, 16);
        T::unpack(whole, z[j]);
        c.epochs[lane] = epoch[j] + 1;
#pragma unroll
        for (int i = 0; i < T::COUNT; ++i) sum += LAYER ? z[j][i] : z[j][i] * z[j][i];
    }
    float mean = 0, spread = block_sum(sum, shared) / c.hidden;
    if (LAYER) {
        mean = spread;
        float squares = 0;
#pragma unroll
        for (int j = 0; j < VECTORS; ++j)
            if (threadIdx.x + j * blockDim.x < width)
#pragma unroll
                for (int i = 0; i < T::COUNT; ++i) squares += (z[j][i] - mean) * (z[j][i] - mean);
        spread = block_sum(squares, shared) / c.hidden;
    }
    float scale = rsqrtf(spread + c.eps);
#pragma unroll
    for (int j = 0; j < VECTORS; ++j) {
        int v = threadIdx.x + j * blockDim.x;
        if (v >= width) continue;
        float g[T::COUNT], b[T::COUNT];
        T::unpack(gamma[j], g);
        T::unpack(beta[j], b);
#pragma unroll
        for (int i = 0; i < T::COUNT; ++i) z[j][i] = (z[j][i] - mean) * scale * g[i] + (c.beta ? b[i] : 0.0f);
        store(c.out + (token + v) * 16, T::pack(z[j]), 16);
    }
}

// ------------------------------------------------------------------------------------------------------------ kernels

#define KERNEL(name, threads, ...) \
    extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Call c, u64 total_bytes) { __VA_ARGS__; }

// The host appends one line for each kernel that it needs, such as KERNEL(one_shot_bf16_sum, 1024, (one_shot<Bf16, Sum>(c))).
