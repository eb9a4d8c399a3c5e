// A matmul of few tokens, y[T, N] = x[T, K] W[N, K]^T (+ b): bf16 or fp16, sums in float32. Its time is that of reading W,
// so W is read once, and all else is arranged so that its stream neither starts late nor stops. W is the tensor cores' A side
// (64 or 16 rows at a time), x the B side, so that few tokens waste no rows.
//
//   streamed  Hopper. One thread has the copy engine fill a ring of stages in shared memory, weights and tokens together;
//             warpgroups multiply out of it (wgmma). K is split over the S blocks of a cluster, which send each other their
//             sums (distributed shared memory).
//   plain     the same result on any GPU from sm_80 on, from the older tensor core instruction.
//
// Sums are taken in one order, so a call gives the same bits every time. Nothing is kept between calls: a CUDA graph may
// replay them. The order of k within a step of the tensor cores does not matter as long as W and x agree in it.
//
// Programmatic dependent launch: a block waits for the kernel before it when it needs x. Its first weights it reads before,
// if the host says that they are older than that kernel (`early`). It lets the kernel after it in when it has asked for its
// last weights, so that this kernel's first reads follow its own last ones.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

struct __align__(64) Map { u64 w[16]; };  // CUtensorMap

struct Call {
    Map x_map, w_map;  // streamed: boxes of 64 k by all tokens (at most TOKENS), and by 64 GROUPS features
    const u8* x;
    const u8* w;
    const u8* bias;  // or null
    u8* y;
    u32 tokens;
    u32 n;
    u32 k;      // a multiple of 8
    u32 early;   // the weights were there before the kernel before began
    u32 stages;  // of the ring; one only if it holds all of a block's share
};

#define MOST_STAGES 24
#define DO(text, ...) asm volatile(text : __VA_ARGS__ : : "memory")
#define RUN(text) asm volatile(text ::: "memory")
#define WITH(text, ...) asm volatile(text ::__VA_ARGS__ : "memory")

__device__ __forceinline__ u32 shared_at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

struct Bf16 {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 v;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
        return v;
    }
    static __device__ __forceinline__ float unpack(u16 v) { return __uint_as_float((u32)v << 16); }
};
struct Fp16 {
    static __device__ __forceinline__ u32 pack(float low, float high) {
        u32 v;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
        return v;
    }
    static __device__ __forceinline__ float unpack(u16 v) {
        float f;
        asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
        return f;
    }
};

// Sums of token t, features n to n + 3: their biases added, rounded, written.
template <class E>
__device__ __forceinline__ void put(const Call& c, u32 t, u32 n, float4 v) {
    float f[4] = {v.x, v.y, v.z, v.w};
    if (c.bias)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (n + i < c.n) f[i] += E::unpack(((const u16*)c.bias)[n + i]);
    u32 low = E::pack(f[0], f[1]), high = E::pack(f[2], f[3]);
    u16* at = (u16*)c.y + (u64)t * c.n + n;
    if ((c.n & 3) == 0) {
        *(uint2*)at = make_uint2(low, high);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (n + i < c.n) at[i] = (u16)((i < 2 ? low : high) >> (16 * (i & 1)));
}

// ------------------------------------------------------------------------------------------------------------ plain

template <class E> __device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1);
#define MMA(E, type)                                                                                                        \
    template <> __device__ __forceinline__ void mma<E>(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {          \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));       \
    }
MMA(Bf16, "bf16")
MMA(Fp16, "f16")

// A block of WARPS warps takes 32 features and 8 TILES tokens (blockIdx.y); its warps share K, 64 at a time. A lane loads 8
// values of k of a row at once, which are the operands of two instructions: no lane needs what another has loaded.
template <class E, int TILES>
__device__ __forceinline__ void plain(const Call& c) {
    const int WARPS = 8, ROWS = 32, SUM_ROW = ROWS + 4, AHEAD = 2;  // a row length that spreads over the banks
    __shared__ float sums[WARPS][8 * TILES][SUM_ROW];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const u32 first = blockIdx.x * ROWS, token = blockIdx.y * 8 * TILES, tokens = min(c.tokens - token, 8 * TILES);
    const uint4 none = make_uint4(0, 0, 0, 0);
    const u8 *w[4], *x[TILES];
#pragma unroll
    for (int r = 0; r < 4; ++r) w[r] = c.w + (u64)min(first + 8 * r + group, c.n - 1) * c.k * 2;
#pragma unroll
    for (int t = 0; t < TILES; ++t) x[t] = c.x + (u64)(token + min(8 * t + group, tokens - 1)) * c.k * 2;
    uint4 ring[AHEAD][4];
    auto fetch = [&](int slot, u32 step) {
        u32 k = step * 32 + quad * 8;
#pragma unroll
        for (int r = 0; r < 4; ++r) ring[slot][r] = k < c.k ? __ldg((const uint4*)(w[r] + (u64)k * 2)) : none;
    };
    float d[2][TILES][4] = {};
    const u32 steps = (c.k + 31) / 32;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) fetch(a, warp + a * WARPS);
    for (u32 step = warp; step < steps; step += AHEAD * WARPS)
#pragma unroll
        for (int a = 0; a < AHEAD; ++a) {
            u32 now = step + a * WARPS, k = now * 32 + quad * 8;
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                uint4 b = k < c.k ? *(const uint4*)(x[t] + (u64)k * 2) : none;
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const uint4 &top = ring[a][2 * m], &low = ring[a][2 * m + 1];
                    mma<E>(d[m][t], top.x, low.x, top.y, low.y, b.x, b.y);
                    mma<E>(d[m][t], top.z, low.z, top.w, low.w, b.z, b.w);
                }
            }
            fetch(a, now + AHEAD * WARPS);
        }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[warp][8 * t + 2 * quad + i % 2][16 * m + group + i / 2 * 8] = d[m][t][i];
    __syncthreads();
    for (u32 i = threadIdx.x; i < tokens * (ROWS / 4); i += 32 * WARPS) {
        u32 t = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
        if (first + r >= c.n) continue;
        float4 total = *(float4*)&sums[0][t][r];
#pragma unroll
        for (int s = 1; s < WARPS; ++s) total = total + *(float4*)&sums[s][t][r];
        put<E>(c, token + t, first + r, total);
    }
}

#define PLAIN(name, ...) \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Call c) { plain<__VA_ARGS__>(c); }

// --------------------------------------------------------------------------------------------------------- streamed

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Barriers in shared memory: a phase ends when `count` arrivals and all bytes that were announced are in.
__device__ __forceinline__ void barrier_init(u32 at, u32 count) { WITH("mbarrier.init.shared::cta.b64 [%0], %1;", "r"(at), "r"(count)); }
__device__ __forceinline__ void barrier_arrive(u32 at) { WITH("mbarrier.arrive.shared::cta.b64 _, [%0];", "r"(at)); }
__device__ __forceinline__ void barrier_announce(u32 at, u32 bytes) { WITH("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "r"(at), "r"(bytes)); }
__device__ __forceinline__ void barrier_wait(u32 at, u32 parity) {
    WITH("{ .reg .pred p; again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1; @!p bra again; }", "r"(at), "r"(parity));
}
// The box of a tensor map at (k, row), to shared memory; what lies outside of the tensor arrives as zeros.
__device__ __forceinline__ void copy_box(u32 to, const Map* map, u32 k, u32 row, u32 barrier, u64 policy) {
    WITH("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;",
         "r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier), "l"(policy));
}
__device__ __forceinline__ void send(u32 at, u32 block, float v) {
    WITH("{ .reg .u32 a; mapa.shared::cluster.u32 a, %0, %1; st.shared::cluster.f32 [a], %2; }", "r"(at), "r"(block), "f"(v));
}

// wgmma's name for a tile of rows of 128 bytes in the swizzle of the copy engine, 1024 bytes for 8 rows.
__device__ __forceinline__ u64 tile(u32 at) { return (u64)(at >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62; }

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R32 R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
template <class E, int TOKENS> struct Wgmma;
#define WGMMA(E, type, tokens, d_, a_, b_, ...)                                                                             \
    template <> struct Wgmma<E, tokens> {                                                                                   \
        static __device__ __forceinline__ void go(float* d, u64 a, u64 b) {                                                 \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #tokens "k16.f32." type "." type " {" d_ "}, " a_ ", " b_ ", 1, 1, 1, 0, 0;" \
                         : __VA_ARGS__ : "l"(a), "l"(b));                                                                   \
        }                                                                                                                   \
    };
#define WGMMAS(E, type)                                                      \
    WGMMA(E, type, 8, "%0,%1,%2,%3", "%4", "%5", D4(0))                      \
    WGMMA(E, type, 16, "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9", D4(0), D4(4))  \
    WGMMA(E, type, 32, R16, "%16", "%17", D16(0))                            \
    WGMMA(E, type, 64, R32, "%32", "%33", D16(0), D16(16))
WGMMAS(Bf16, "bf16")
WGMMAS(Fp16, "f16")

// 64 rows by 16 k of W times all tokens; more than 64 tokens in several instructions.
template <class E, int TOKENS>
__device__ __forceinline__ void multiply(float* d, u64 a, u64 b) {
    if constexpr (TOKENS > 64) {
        Wgmma<E, 64>::go(d, a, b);
        multiply<E, TOKENS - 64>(d + 32, a, b + (64 * 128 >> 4));
    } else {
        Wgmma<E, TOKENS>::go(d, a, b);
    }
}

// GROUPS warpgroups, each with 64 features; one more warp, whose first thread feeds them. A stage holds BOXES times 64 k.
template <class E, int TOKENS, int GROUPS, int BOXES, int S>
__device__ __forceinline__ void streamed(const Call& c) {
    const int ROWS = 64 * GROUPS, MINE = ROWS / S, SUM_ROW = MINE + 4, FEEDER = 128 * GROUPS;
    const u32 W_BOX = ROWS * 128, X_BOX = TOKENS * 128, STAGE = BOXES * (W_BOX + X_BOX);
    extern __shared__ u8 memory[];
    __shared__ __align__(8) u64 barriers[2 * MOST_STAGES];
    const u32 base = (shared_at(memory) + 1023) & ~1023u, full = shared_at(barriers), empty = full + 8 * MOST_STAGES;
    // [S][TOKENS][SUM_ROW] sums of the features that this block ends with. Only from other blocks do they come while the ring turns.
    const u32 received = S > 1 ? base + c.stages * STAGE : base;
    const u32 part = blockIdx.x % S, first = blockIdx.x / S * ROWS, warp = threadIdx.x / 32;
    const u32 all = (c.k + 64 * BOXES - 1) / (64 * BOXES), share = (all + S - 1) / S;
    const u32 begin = min(part * share, all), steps = min(begin + share, all) - begin;

    if (threadIdx.x == FEEDER) {
        WITH("prefetch.tensormap [%0];", "l"(&c.w_map));
        WITH("prefetch.tensormap [%0];", "l"(&c.x_map));
        for (u32 i = 0; i < c.stages; ++i) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 4 * GROUPS);
        }
        RUN("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
    if (S > 1) RUN("barrier.cluster.arrive.relaxed.aligned;");
    float d[TOKENS / 2] = {};
    if (threadIdx.x == FEEDER) {
        u64 once, often;
        DO("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;", "=l"(once));
        DO("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;", "=l"(often));
        const u32 ahead = min(c.stages, steps), bytes = BOXES * (W_BOX + c.tokens * 128);  // rows beyond them stay as they are
        auto fill = [&](u32 i, u32 slot, const Map* map, u32 row, u32 at, u32 box, u64 policy) {
#pragma unroll
            for (int j = 0; j < BOXES; ++j)
                copy_box(base + slot * STAGE + at + j * box, map, ((begin + i) * BOXES + j) * 64, row, full + 8 * slot, policy);
        };
        auto weights = [&](u32 i, u32 slot) {
            barrier_announce(full + 8 * slot, bytes);
            fill(i, slot, &c.w_map, first, 0, W_BOX, once);
        };
        auto tokens = [&](u32 i, u32 slot) { fill(i, slot, &c.x_map, 0, BOXES * W_BOX, X_BOX, often); };
        if (!c.early) RUN("griddepcontrol.wait;");
        for (u32 i = 0; i < ahead; ++i) weights(i, i);
        RUN("griddepcontrol.wait;");
        for (u32 i = 0; i < ahead; ++i) tokens(i, i);
        for (u32 i = ahead, slot = 0, round = 0; i < steps; ++i) {
            barrier_wait(empty + 8 * slot, round);
            weights(i, slot);
            tokens(i, slot);
            if (++slot == c.stages) slot = 0, round ^= 1;
        }
        RUN("griddepcontrol.launch_dependents;");
    } else if (threadIdx.x < FEEDER) {
        for (u32 i = 0, slot = 0, round = 0, before = 0; i < steps; ++i) {
            const u32 w = base + slot * STAGE + warp / 4 * 8192, x = base + slot * STAGE + BOXES * W_BOX;
            barrier_wait(full + 8 * slot, round);
            RUN("wgmma.fence.sync.aligned;");
#pragma unroll
            for (int j = 0; j < 4 * BOXES; ++j)
                multiply<E, TOKENS>(d, tile(w + j / 4 * W_BOX + j % 4 * 32), tile(x + j / 4 * X_BOX + j % 4 * 32));
            RUN("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 1;");
            if (i && threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * before);
            before = slot;
            if (++slot == c.stages) slot = 0, round ^= 1;
        }
        RUN("wgmma.wait_group.sync.aligned 0;");
    }
    __syncwarp();
    RUN("griddepcontrol.wait;");  // y and the bias are touched from here on
    if (S > 1) RUN("barrier.cluster.wait.acquire.aligned;");  // every block of the cluster has begun
    else __syncthreads();                                      // the ring has turned to its end
    if (threadIdx.x < FEEDER) {
        const u32 feature = warp * 16 + threadIdx.x % 32 / 4, token = threadIdx.x % 4 * 2;
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) {
            const u32 f = feature + i % 4 / 2 * 8, t = token + i / 4 * 8 + i % 2;
            send(received + ((part * TOKENS + t) * SUM_ROW + f % MINE) * 4, f / MINE, d[i]);
        }
    }
    if (S > 1) RUN("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;");
    else __syncthreads();
    const float* sums = (const float*)(memory + (received - shared_at(memory)));
    for (u32 i = threadIdx.x; i < c.tokens * (MINE / 4); i += FEEDER + 32) {
        const u32 t = i / (MINE / 4), r = i % (MINE / 4) * 4, n = first + part * MINE + r;
        if (n >= c.n) continue;
        float4 total = *(const float4*)&sums[t * SUM_ROW + r];
#pragma unroll
        for (int s = 1; s < S; ++s) total = total + *(const float4*)&sums[(s * TOKENS + t) * SUM_ROW + r];
        put<E>(c, t, n, total);
    }
}

#define STREAMED(name, threads, ...) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Call c) { streamed<__VA_ARGS__>(c); }

#endif

// The host appends one line for the kernel that it needs, such as STREAMED(name, 160, Bf16, 8, 1, 2, 2).
